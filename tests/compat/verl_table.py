"""The table verl's metric → workbench's → the same, or how it differs; docs/verl.md is made of it, and of `compat.verl_account`.

A row is `verl's | ours | note`. `=` in place of ours: the same name and number, `≈`: the same up to the randomness of draws;
`test_compat_verl_table.py` compares both beside verl. `—`: there is none, and the note says why. Any other ours is another name,
or the same name with a number that differs as the note says. `{a,b}` stands for several keys, `<x>` and `*` for any text.
`python tests/compat/verl_table.py` writes docs/verl.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from workbench.compat.verl_account import TableEntry, entries
from workbench.compat.verl_command import keys

PAGE = Path(__file__).parents[2] / "docs" / "verl.md"

METRICS = """
critic/score/{mean,max,min} | = | over rows that were scored, which are all of verl's; `critic/score/std` is ours
critic/rewards/{mean,max,min} | = | after a KL in the reward
critic/advantages/{mean,max,min} | = | without rejected tokens
critic/returns/{mean,max,min} | = |
critic/values/{mean,max,min} | = | a step's row has them without rejected tokens, the stage `values` with them
critic/vf_explained_var | = |
response_length/{mean,max,min} | = | all tokens of a response, tool text included; `model_tokens/…` are the model's own
response_length/clip_ratio | = | the share of rows that fill `max_tokens`, to which verl's own batches are padded
response_length_non_aborted/{mean,max,min} | = |
response_length_non_aborted/clip_ratio | = |
response/aborted_ratio | = | the share of empty responses
prompt_length/{mean,max,min} | = |
prompt_length/clip_ratio | = | absent without a `max_prompt_length`
num_turns/{mean,max,min} | = | of episodes; absent for single responses
tool_call_counts/{mean,max,min} | = | of episodes; in verl where an agent loop writes the column
training/num_turns/{mean,max,min} | num_turns/{mean,max,min} | the same number
timing_s/{gen,ref,values,adv,update_critic,update_actor} | = | seconds of the stage
timing_s/{reward,old_log_prob,testing} | timing_s/{reward,old_log_prob,testing} | seconds of the stage, of validation; not compared: a clock
timing_s/step | timing_s/step | the seconds of all stages; saving is not in it
timing_s/update_weights | timing_s/update_weights | seconds of the last push of weights to a sampler; not compared: a clock
timing_s/{save_checkpoint,start_profile,stop_profile,dump_rollout_generations} | — | part of other seconds, or outside the step
timing_s/{switch_to_rollout,switch_to_trainer,switch_wait} | — | engines do not change their role
timing_s/agent_loop/{generate_sequences,tool_calls}/{mean,max,min} | agent_loop/{generate_sequences,tool_calls}/{mean,max,min} | the same number
timing_s/agent_loop/{num_preempted,compute_score}/{mean,max,min} | — | not measured per episode
timing_s/agent_loop/slowest/* | — | look at the trace: every row has its turns
timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor} | = | absent, where verl has 0, for a batch without tokens
perf/total_num_tokens | = |
perf/time_per_step | = | of our `timing_s/step`
perf/throughput | = | tokens per second and device: the learner's ranks and samplers on devices of their own; a server elsewhere is one
{perf/mfu/actor,perf/mfu/critic,perf/mfu/actor_infer,actor/mfu,critic/mfu} | — | FLOPs are not estimated
perf/max_memory_{allocated,reserved}_gb | perf/max_memory_{allocated,reserved}_gb | of this process; of FSDP's ranks: none
perf/cpu_memory_used_gb | perf/max_rss_gb | verl: memory in use on the machine; ours: the most that this process has had
actor/entropy | actor/entropy | the mean over tokens; verl aggregates by `loss_agg_mode`, the same with `token-mean`
actor/{pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl} | = | loss `vanilla`; a step's is the mean over its mini-batches
actor/entropy_loss | = | where `entropy_coeff` is not 0
actor/{kl_loss,kl_coef} | = | with a KL in the loss
actor/{grad_norm,lr,loss} | actor/{grad_norm,lr,loss} | the same meaning; not compared: the optimizer's
actor/mtp_losses* | — | no multi-token prediction
critic/{vf_loss,vf_clipfrac,vpred_mean} | = |
critic/{grad_norm,lr,loss} | critic/{grad_norm,lr,loss} | the same meaning; not compared: the optimizer's
actor/{reward_kl_penalty,reward_kl_penalty_coeff} | = |
training/global_step | training/global_step | the same meaning; row 0 is the validation before the first step
training/epoch | training/epoch | the same meaning
training/rollout_probs_diff_{valid,max,mean,std} | = | absent where verl writes 0 or NaN
training/rollout_actor_probs_pearson_corr | = | absent where verl writes NaN
training/off_policy/trajectory_spans/* | streaming/several_versions | the share of rows whose tokens are of several versions; the column `token_versions` has each token's
training/off_policy/trajectory_staleness{,_worst}/{mean,max} | training/policy_lag/{mean,max} | versions that rows are behind the learner
training/off_policy/trajectory_staleness{,_worst}/min | — | 0 in all but the first step of a run ahead
{training,validation}/filter_groups/evicted_samples | filter_groups/dropped | the same meaning, of training; verl's trainer: prompts dropped for equal rewards
{training,validation}/filter_groups/discarded_surplus_samples | filter_groups/surplus | the same meaning, of training
{training,validation}/{off_policy,rollout_failure}/evicted_samples{,_staleness/*} | — | no row waits to be evicted; a failed episode is a row that was not scored
rollout_corr/* | = | absent where verl writes NaN
global_seqlen/* | — | rows are shared out inside the engine, balanced by length at every pass
variance_proxy/* | — | not measured; `sum_pi_squared` is there for it
gdpo/<part>/{mean,max,min} | reward/<part>/{mean,max,min} | over rows that were scored
gdpo/<part>/std | — | the column `reward/<part>` is in the batch
rollout/spec_accept_{rate,length} | — | no speculative decoding
rollout/moe{,/*} | — | the column `routed_experts` (`routing_replay=True`) has them, no metric does
val-{core,aux}/<source>/<variable>/mean@<n> | = | variables: `reward` and the reward's named parts; the part `acc` is the core one where there is any
val-aux/<source>/<variable>/std@<n> | = |
val-{core,aux}/<source>/<variable>/best@<n>/{mean,std} | ≈ | exact, where verl draws 1000 times
val-aux/<source>/<variable>/worst@<n>/{mean,std} | ≈ | exact, where verl draws 1000 times
val-{core,aux}/<source>/<variable>/maj@<n>/{mean,std} | ≈ | 1000 other draws; as in verl of prompts all of whose samples have an answer
val-aux/num_turns/{min,max,mean} | = | of episodes
distillation/loss | actor/{loss,distill} | alone, and as a term beside RL's; the estimate of each token is the column `divergence`
distillation/{loss_max,loss_min} | actor/{divergence,distill_divergence}_{max,min} | before `loss_max_clamp`, as in verl
distillation/* | — | not measured
{separate_async,fully_async}/* | streaming/* | of a stream (`max_lag`), by other counts
"""

OURS = """
reward/mean | mean reward of scored rows, empty responses included
reward/<part>/{mean,max,min} | a named part of the reward
reward/status/<status> | rows by status of their score
reward/scored_ratio, reward/empty_responses | rows that were scored; empty responses
reward/greedy_baseline, reward/without_baseline | ReMax: the greedy rows' mean reward; prompts whose greedy row was not scored
reward/overlong/{mean,share} | DAPO's length penalty
critic/score/std | deviation of the scores in `critic/score/mean`
model_tokens/{mean,max,min} | an episode's tokens of the model's own
response/cut_ratio | rows whose finish reason is `length`
turn_scores/{mean,max,min} | scores that `TurnScores` places
tree/sampled_tokens, tree/shared_ratio | own tokens of a tree rollout, shared ones counted once; the share of own tokens that an earlier row has, too
tree/branched, tree/learnt_tokens | rows that were branched from another; own tokens that are in the loss, with `LearntOnce`
advantage/{singleton_groups,zero_rows,zero_share} | groups of one row; rows without any advantage
agent_loop/{num_turns,num_tool_calls}/{mean,max,min} | the same as `num_turns/…` and `tool_call_counts/…`, by the rollout
agent_loop/{errors,tool_errors} | episodes with a failed parser, tool release or user; failed tool calls
train/num_gen_batches, filter_groups/{kept,dropped,surplus} | DAPO's dynamic sampling
resample/distinct | PF-PPO: the share of distinct rows
data/<part>/{prompts,score}, data/stage | of each part of a `mix` its prompts in a step and their mean reward; the stage of `stages`
data/{grown,new_rows,new_rows_repeated,new_rows_refused,new_rows_above_max} | `growing`: new rows in all, taken, left out
data/{rows_seen,rows_outside} | `adaptive`: rows that have been drawn, and of them those outside the band
training/policy_lag/{mean,max} | versions that rows are behind the learner
training/rollout_kl, training/rollout_log_probs_diff_max | KL(sampler‖trainer) in nats a token; largest difference of log-probs
actor/full_kl, actor/full_kl_max, actor/full_kl_{k1,k3}, influence/* | stages that only measure
{actor,critic}/{skipped,nonfinite} | updates left out: critic warm-up; a loss that is not finite
timing_s/<stage>, timing_s/overlapped | seconds of a stage under its own name; of work done during the step before
perf/max_rss_gb | the most memory that this process has had, GiB
perf/update_weights_gb, perf/update_weights_host_gb | GiB of the last push of weights to a sampler: sent; of host memory
val/{reward,reward_low,reward_high,greedy,unscored}, accuracy | held-out reward with its 95 % interval, greedy reward, rows not scored
val-aux/<source>/reward/pass@<k> | unbiased pass@k
"""

DATA = """
DataProto.unfold_column_chunks | = | objects are lists, which are cut as well; verl fails without `split_keys` where there are objects
fold_batch_dim, unfold_batch_dim | DataProto.split, DataProto.concat | a list of batches: the dims of a column stay what they are declared to be
DataProtoConfig.auto_padding, DataProto.is_padding_enabled, DataProto.padding | DataProto.pad_to_divisor, DataProto.unpad | said where it is done, by the rows it adds; engines share out uneven batches by themselves
load_reward_manager(config, tokenizer, num_examine) | reward_from(block, tokenizer=…) | the whole block as one reward; a key that cannot be honoured is refused by name
get_reward_manager_cls(name) | rewards.manager_class(name) | the class, with verl's constructor and call
get_custom_reward_fn(config) | rewards.load_function(path, name, **reward_kwargs) | run by worker processes only
compute_reward(data, reward_fn), compute_reward_async | reward.score(batch), manager(data, return_dict=True) | a failure is a row's status, where verl calls the manager again
AgentLoopBase.server_manager.generate | = | the ids are a list, with `token_ids`, `log_probs` and `stop_reason`; an output may leave the log-probs out
AgentLoopBase.{apply_chat_template,process_vision_info,loop,processor} | = | text alone; with `remove_system_prompt` the ids follow the end token that the model wrote, line break included
AgentLoopBase.{config,rollout_config} | = | `prompt_length` and `response_length`, in the constructor too where the class or its name is given as agent=; other keys are not there
AgentLoopOutput.{extra_fields,multi_modal_data,routed_experts} | AgentLoopOutput.extra | the last two only empty
BaseInteraction | agents.BaseInteraction | the same methods; a class written for verl needs another import line
get_seqlen_balanced_partitions | functional.balancing.balanced | never less balanced
get_group_balanced_partitions | functional.balancing.balanced_groups | groups need not be neighbours
compute_advantage_for_multi_trajectories | stages.Advantage | for every estimator of whole rows, where verl has grpo alone; the last row of a session (column `session`, or another by `sessions=`) is the one that counts
"""


class Row(NamedTuple):
    """A row of one of the tables."""

    theirs: str
    ours: str
    note: str


def rows(text: str) -> list[Row]:
    """The rows of a table."""
    cells = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    return [Row(*([*cell, ""] if len(cell) == 2 else cell)) for cell in cells]


def matching(key: str, pattern: str) -> bool:
    """Whether a key is one of those that a pattern stands for; patterns may be several, by `, `."""
    every = [one for part in pattern.split(", ") for one in keys(part)]
    return any(
        re.fullmatch(
            "".join(".+" if one.startswith(("<", "*")) else re.escape(one) for one in re.split(r"(<[^>]*>|\*)", each)),
            key,
        )
        for each in every
    )


def _kind(entry: TableEntry) -> str:
    """`refused unless null`, as the table has it."""
    unless = f" unless {', '.join(entry.unless)}" if entry.unless else ""
    return f"{entry.kind}{unless}{f' if {entry.only_if}' if entry.only_if else ''}"


def page() -> str:
    """docs/verl.md."""
    same = {"=": "the same", "≈": "the same but for random draws", "—": "none"}

    def table(heads: str, lines: list[list[str]]) -> list[str]:
        return [
            heads,
            "|".join(["", *["---"] * heads.count(" | "), "---", ""]),
            *(f"| {' | '.join(one)} |" for one in lines),
        ]

    def code(text: str) -> str:
        return ", ".join(f"`{one}`" for one in text.split(", "))

    metrics = [[code(one.theirs), same.get(one.ours) or code(one.ours), one.note] for one in rows(METRICS)]
    functions = [[code(one.theirs), same.get(one.ours) or code(one.ours), one.note] for one in rows(DATA)]
    settings = [
        [
            f"`{one.key}`",
            _kind(one),
            same.get(one.place) or code(one.place),
            one.note,
            "the same" if one.default == "=" else one.default,
        ]
        for one in entries()
    ]
    ours = [[code(one.theirs), one.ours] for one in rows(OURS)]
    return "\n".join(
        [
            "# verl's names here",
            "",
            "Made by `python tests/compat/verl_table.py`; `tests/compat/test_compat_verl_table.py` compares it beside verl 0.9.1.",
            "A metric with verl's name means what it means in verl. A metric that has no value is absent, where verl writes NaN.",
            "",
            "## Metrics of verl's trainer",
            "",
            *table("| verl | workbench | note |", metrics),
            "",
            "## Metrics of our own",
            "",
            *table("| metric | what it is |", ours),
            "",
            "## Functions that differ",
            "",
            *table("| verl | workbench | note |", functions),
            "",
            "## Settings",
            "",
            "What `wb.compat.verl` and `workbench translate` make of each: `exact`, the same here; `near`, the same but as the note",
            "says; `hardware`, changes no number; `refused`, changes numbers and is not here; `alias`, another spelling.",
            "",
            *table("| verl | kind | workbench | note | default |", settings),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
