"""The table verl's metric or setting → workbench's → the same, or how it differs; docs/verl.md is made of it.

A row is `verl's | ours | note`. `=` in place of ours: the same name and number, `≈`: the same up to the randomness of draws;
`test_compat_verl_table.py` compares both beside verl. `—`: there is none, and the note says why. Any other ours is another name,
or the same name with a number that differs as the note says. `{a,b}` stands for several keys, `<x>` and `*` for any text.
Of a setting the note `=` says that the default is the same, which the test compares with verl's yaml.

`python tests/compat/verl_table.py` writes docs/verl.md.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import NamedTuple

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
timing_s/{save_checkpoint,update_weights,start_profile,stop_profile,dump_rollout_generations} | — | part of other seconds, or outside the step
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
training/off_policy/trajectory_spans/* | — | a response is sampled by one version; an episode records the last turn's
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
rollout/moe{,/*} | — | no routed experts are recorded
val-{core,aux}/<source>/<variable>/mean@<n> | = | variables: `reward` and the reward's named parts; the part `acc` is the core one where there is any
val-aux/<source>/<variable>/std@<n> | = |
val-{core,aux}/<source>/<variable>/best@<n>/{mean,std} | ≈ | exact, where verl draws 1000 times
val-aux/<source>/<variable>/worst@<n>/{mean,std} | ≈ | exact, where verl draws 1000 times
val-{core,aux}/<source>/<variable>/maj@<n>/{mean,std} | ≈ | 1000 other draws; as in verl of prompts all of whose samples have an answer
val-aux/num_turns/{min,max,mean} | = | of episodes
distillation/* | — | no distillation
{separate_async,fully_async}/* | — | one step ahead at most (`ahead=1`)
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
advantage/{singleton_groups,zero_rows,zero_share} | groups of one row; rows without any advantage
agent_loop/{num_turns,num_tool_calls}/{mean,max,min} | the same as `num_turns/…` and `tool_call_counts/…`, by the rollout
agent_loop/{errors,tool_errors} | episodes with a failed parser, tool release or user; failed tool calls
train/num_gen_batches, filter_groups/{kept,dropped,surplus} | DAPO's dynamic sampling
resample/distinct | PF-PPO: the share of distinct rows
training/policy_lag/{mean,max} | versions that rows are behind the learner
training/rollout_kl, training/rollout_log_probs_diff_max | KL(sampler‖trainer) in nats a token; largest difference of log-probs
actor/full_kl, actor/full_kl_max, actor/full_kl_{k1,k3}, influence/* | stages that only measure
{actor,critic}/{skipped,nonfinite} | updates left out: critic warm-up; a loss that is not finite
timing_s/<stage>, timing_s/overlapped | seconds of a stage under its own name; of work done during the step before
perf/max_rss_gb | the most memory that this process has had, GiB
val/{reward,reward_low,reward_high,greedy,unscored}, accuracy | held-out reward with its 95 % interval, greedy reward, rows not scored
val-aux/<source>/reward/pass@<k> | unbiased pass@k
"""

SETTINGS = """
actor_rollout_ref.actor.optim.lr | LocalSettings.lr | =
actor_rollout_ref.actor.optim.betas | LocalSettings.betas | =
actor_rollout_ref.actor.optim.weight_decay | LocalSettings.weight_decay | =
actor_rollout_ref.actor.optim.clip_grad | LocalSettings.grad_clip | =
actor_rollout_ref.actor.grad_clip | LocalSettings.grad_clip | =
actor_rollout_ref.actor.optim.lr_scheduler_type | LocalSettings.schedule | =
actor_rollout_ref.actor.optim.lr_warmup_steps | LocalSettings.warmup_steps | 0, where verl has -1 for "by lr_warmup_steps_ratio", which is 0
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio | — | give the steps
actor_rollout_ref.actor.ppo_max_token_len_per_gpu | LocalSettings.micro_batch_tokens | =
actor_rollout_ref.actor.use_dynamic_bsz | — | always: a micro-batch is a budget of tokens
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu | — | give tokens: micro_batch_tokens
actor_rollout_ref.actor.ppo_mini_batch_size | grpo(ppo_mini_batch_size) | prompts, as in verl; None is the whole batch, where verl has 256
actor_rollout_ref.actor.ppo_epochs | grpo(ppo_epochs) | =
actor_rollout_ref.actor.shuffle | Update(shuffle) | =
actor_rollout_ref.actor.clip_ratio | — | clip_ratio_low and clip_ratio_high, as verl reads it
actor_rollout_ref.actor.clip_ratio_low | PolicyLoss.clip_ratio_low | =
actor_rollout_ref.actor.clip_ratio_high | PolicyLoss.clip_ratio_high | =
actor_rollout_ref.actor.clip_ratio_c | PolicyLoss.clip_ratio_c | =
actor_rollout_ref.actor.tau_pos | PolicyLoss.tau_pos | =
actor_rollout_ref.actor.tau_neg | PolicyLoss.tau_neg | =
actor_rollout_ref.actor.entropy_coeff | PolicyLoss.entropy_coeff | =
actor_rollout_ref.actor.loss_agg_mode | PolicyLoss.loss_agg_mode | =
actor_rollout_ref.actor.loss_scale_factor | PolicyLoss.loss_scale_factor | =
actor_rollout_ref.actor.use_kl_loss | PolicyLoss.kl_coef | on where it is not 0
actor_rollout_ref.actor.kl_loss_coef | grpo(kl_coef) | =
actor_rollout_ref.actor.kl_loss_type | PolicyLoss.kl_type | =
actor_rollout_ref.actor.policy_loss.loss_mode | PolicyLoss.loss_mode | =
actor_rollout_ref.actor.policy_loss.clip_cov_ratio | PolicyLoss.clip_cov_ratio | =
actor_rollout_ref.actor.policy_loss.clip_cov_lb | PolicyLoss.clip_cov_lb | =
actor_rollout_ref.actor.policy_loss.clip_cov_ub | PolicyLoss.clip_cov_ub | =
actor_rollout_ref.actor.policy_loss.kl_cov_ratio | PolicyLoss.kl_cov_ratio | =
actor_rollout_ref.actor.policy_loss.ppo_kl_coef | PolicyLoss.ppo_kl_coef | =
actor_rollout_ref.actor.policy_loss.dro_beta | PolicyLoss.dro_beta | 0.1, where verl has none and asks for one
actor_rollout_ref.actor.calculate_sum_pi_squared | LogProb(sum_pi_squared) | =
actor_rollout_ref.actor.fsdp_config.reshard_after_forward | FsdpSettings.reshard_after_forward | =
actor_rollout_ref.actor.fsdp_config.param_offload | FsdpSettings.offload | "all"; verl's default is none, as ours
actor_rollout_ref.actor.fsdp_config.optimizer_offload | FsdpSettings.offload | "optimizer"; verl's default is none, as ours
actor_rollout_ref.actor.ulysses_sequence_parallel_size | — | no sequence parallelism
actor_rollout_ref.model.enable_gradient_checkpointing | LocalSettings.gradient_checkpointing | off, where verl has it on: results are the same
actor_rollout_ref.model.use_remove_padding | LocalSettings.pack | auto, where verl has it on: results are the same
actor_rollout_ref.model.lora_rank | LocalSettings.lora_rank | =
actor_rollout_ref.model.lora_alpha | LocalSettings.lora_alpha | 32, where verl has 16
actor_rollout_ref.model.target_modules | LocalSettings.lora_targets | the attention's four, where verl has all-linear
actor_rollout_ref.model.trust_remote_code | LocalSettings.trust_remote_code | =
actor_rollout_ref.rollout.n | grpo(group_size) | 8, where verl has 1
actor_rollout_ref.rollout.temperature | SamplingSettings.temperature | =
actor_rollout_ref.rollout.top_p | SamplingSettings.top_p | =
actor_rollout_ref.rollout.top_k | SamplingSettings.top_k | =
actor_rollout_ref.rollout.ignore_eos | SamplingSettings.ignore_eos | =
actor_rollout_ref.rollout.response_length | SamplingSettings.max_tokens | 128, where verl has 512
actor_rollout_ref.rollout.do_sample | SamplingSettings.temperature | temperature 0 is greedy
actor_rollout_ref.rollout.tensor_model_parallel_size | VllmSettings.tensor_parallel_size | 1, where verl has 2
actor_rollout_ref.rollout.val_kwargs.n | train(val_samples) | =
actor_rollout_ref.rollout.val_kwargs.temperature | — | held-out rows are sampled as in training (val/reward) and greedily (val/greedy)
actor_rollout_ref.rollout.multi_turn.max_assistant_turns | ToolAgent(max_assistant_turns) | =
actor_rollout_ref.rollout.multi_turn.max_user_turns | ToolAgent(max_user_turns) | =
actor_rollout_ref.rollout.multi_turn.max_parallel_calls | ToolAgent(max_parallel_calls) | =
actor_rollout_ref.rollout.multi_turn.max_tool_response_length | ToolAgent(max_tool_response_length) | =
actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side | ToolAgent(tool_response_truncate_side) | =
actor_rollout_ref.rollout.multi_turn.tool_config_path | agents.load_tools(path) | the same file
data.train_files | wb.rows(path) | files of rows
data.val_files | train(eval_rows) | held-out rows
data.train_batch_size | train(batch_size) | prompts, as in verl; 8, where verl has 1024
data.max_prompt_length | wb.rows(max_prompt_length) | no limit, where verl has 512
data.max_response_length | grpo(max_tokens) | 128, where verl has 512
data.seed | train(seed) | 0, where verl has none
data.shuffle | — | always: the order is a function of the seed
data.truncation | Rows.fitting(overlong) | =
data.filter_overlong_prompts | Rows.fitting(overlong) | `overlong="drop"`
data.apply_chat_template_kwargs | engines.local(template_switches) | further arguments of the chat template
critic.optim.lr | ppo(critic_lr) | =
critic.cliprange_value | ValueLoss.cliprange_value | =
critic.loss_agg_mode | ValueLoss.loss_agg_mode | follows the actor's in verl: token-mean in both
critic.enable | ppo(critic) | the recipe `ppo` has one
algorithm.adv_estimator | recipes | the recipe of that name; `gae` is `ppo`
algorithm.gamma | ppo(gamma) | =
algorithm.lam | ppo(lam) | =
algorithm.norm_adv_by_std_in_grpo | grpo(norm_adv_by_std) | =
algorithm.use_kl_in_reward | grpo(kl_in_reward) | =
algorithm.kl_penalty | ppo(kl_type) | k1, verl's name for which is kl
algorithm.kl_ctrl.kl_coef | ppo(kl_coef) | =
algorithm.kl_ctrl.type | ppo(kl_target) | adaptive where a target is given
algorithm.kl_ctrl.horizon | ppo(kl_horizon) | =
algorithm.kl_ctrl.target_kl | AdaptiveKL(target) | =
algorithm.filter_groups.max_num_gen_batches | dapo(max_num_gen_batches) | 4, where verl has 0 for "no limit"
algorithm.pf_ppo.reweight_method | Resample(reweight_method) | =
algorithm.pf_ppo.weight_pow | Resample(weight_pow) | =
algorithm.rollout_correction.rollout_is | RolloutCorrection(rollout_is) | =
algorithm.rollout_correction.rollout_is_threshold | RolloutCorrection(rollout_is_threshold) | =
algorithm.rollout_correction.rollout_is_batch_normalize | RolloutCorrection(rollout_is_batch_normalize) | =
trainer.total_training_steps | train(steps) | has to be given
trainer.total_epochs | — | give steps
trainer.save_freq | train(save_freq) | 0 is at the end, which verl has not; verl's -1 is never
trainer.test_freq | train(test_freq) | 0 is at the end; verl's -1 is never
trainer.val_before_train | — | always, where there are eval_rows
trainer.critic_warmup | ppo(critic_warmup) | =
trainer.balance_batch | — | always, at each pass over ranks
trainer.resume_mode | train(resume) | "never", where verl has auto
trainer.max_actor_ckpt_to_keep | train(keep_checkpoints) | a number, where verl keeps all
trainer.rollout_data_dir | train(trace_freq) | whole steps, in the run folder
trainer.default_local_dir | train(run) | the run folder
trainer.logger | train(trackers) | beside the run folder's own files
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
BaseInteraction | agents.BaseInteraction | the same methods; a class written for verl needs another import line
get_seqlen_balanced_partitions | functional.balancing.balanced | never less balanced
get_group_balanced_partitions | functional.balancing.balanced_groups | groups need not be neighbours
compute_advantage_for_multi_trajectories | stages.Advantage(sessions=column) | for every estimator of whole rows, where verl has grpo alone; the last row of a session is the one that counts
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


def keys(pattern: str) -> list[str]:
    """`{a,b}/c` → `a/c`, `b/c`."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


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
        [code(one.theirs), same.get(one.ours) or code(one.ours), "the same default" if one.note == "=" else one.note]
        for one in rows(SETTINGS)
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
            *table("| verl | workbench | default |", settings),
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page())
