"""The scorecard: each fault, what happens here, and the tests that inject it. `docs/scorecard.md` is made of it by a test run.

    make scorecard          run these tests and write the page, with how they ended
    python scorecard.py     write the page without a run

A checkpoints and resume · B workers, nodes, hangs, load · C notebooks and jobs · D bad data and numbers · E security.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "scorecard.md"


@dataclass(frozen=True, init=False)
class Row:
    """A fault, what must happen, the tests that inject it, and where it is not all that, why."""

    fault: str
    promise: str
    tests: tuple[str, ...]
    """`file::function`, below tests/; a test that has parameters is all of its cases."""
    lacking: str

    def __init__(self, fault: str, promise: str, *tests: str, lacking: str = "") -> None:
        for name, value in (("fault", fault), ("promise", promise), ("tests", tests), ("lacking", lacking)):
            object.__setattr__(self, name, value)


_STARRED = "A1 A2 A3 A4 A6 A7 A9 B1 B2 B3 B4 B9 B10 B16 C1 C3 C6 C9 D1 D7 E1 E2 E3 E4 E5 E7 E10"
STARS = frozenset(_STARRED.split())
"""Rows without which nothing is released."""
ROWS: dict[str, Row] = {
    "A1": Row(
        "the trainer is killed between two checkpoints, of one process and of two ranks",
        "the run that goes on has every metric, token and weight of the run that was never killed, bit for bit",
        "runs/test_resume.py::test_killed_and_resumed_is_identical",
        "faults/test_faults_soak.py::test_A1_a_killed_driver_of_two_ranks_goes_on_as_if_nothing_had_been",
    ),
    "A2": Row(
        "a kill at every call that reaches the disk during a save",
        "the newest complete checkpoint is found each time and A1 holds from it; what the save left is named and removed",
        "runs/test_runs_checkpoint.py::test_killed_at_every_write_boundary_a_good_one_stands_and_can_be_gone_on_from",
        "runs/test_resume.py::test_killed_and_resumed_is_identical",
    ),
    "A3": Row(
        "one flipped bit in any file of the newest checkpoint",
        "the file is named with its checksum, the checkpoint before is taken, and the run says so",
        "faults/test_faults_runs.py::test_A3_A4_damage_to_any_file_of_the_newest_is_named_and_the_one_before_is_taken",
        "runs/test_resume.py::test_a_flipped_bit_falls_back_to_the_checkpoint_before",
        "runs/test_runs_checkpoint.py::test_no_flipped_bit_of_the_manifest_is_believed",
        "faults/test_faults_files.py::test_a_flip_a_cut_a_deletion_of_any_file_is_refused_repaired_or_harmless",
    ),
    "A4": Row(
        "files cut short or deleted: shard, manifest, state",
        "as A3; a run never starts over unless it is told to",
        "faults/test_faults_runs.py::test_A3_A4_damage_to_any_file_of_the_newest_is_named_and_the_one_before_is_taken",
        "faults/test_faults_runs.py::test_A4_never_from_scratch_without_being_told",
        "faults/test_faults_files.py::test_a_flip_a_cut_a_deletion_of_any_file_is_refused_repaired_or_harmless",
    ),
    "A5": Row(
        "pointers to the last checkpoint that are empty, stale, dangling or garbage",
        "no file points: the manifests decide, and whatever else lies in the folder is left alone",
        "runs/test_runs_checkpoint.py::test_foreign_names_in_the_folder_are_left_alone",
        "faults/test_faults_runs.py::test_A5_nothing_that_points_to_a_checkpoint_is_believed",
    ),
    "A6": Row(
        "the disk is full during a save",
        "the run stops with what was written, free and needed; the checkpoint before is untouched, and the run goes on when there is room",
        "faults/test_faults_runs.py::test_A6_a_full_disk_stops_loudly_and_hurts_nothing",
        "runs/test_runs_checkpoint.py::test_a_full_disk_is_said_and_hurts_nothing",
    ),
    "A7": Row(
        "stopped exactly at an epoch's end, at the last step, past it",
        "no prompt twice or left out; that nothing is left to do is a note of the run",
        "faults/test_faults_runs.py::test_A7_an_epochs_end_loses_and_repeats_nothing",
        "runs/test_resume.py::test_nothing_left_to_do_and_more_to_do",
    ),
    "A8": Row(
        "one part of the saved state after another is missing or broken",
        "the checkpoint is refused by the part's name; a test shows that each part changes the numbers",
        "runs/test_runs_resume.py::test_each_part_of_the_state_matters",
        "runs/test_runs_resume.py::test_a_checkpoint_that_lacks_something_is_refused",
        "runs/test_runs_resume.py::test_moments_of_fewer_parameters_are_refused",
    ),
    "A9": Row(
        "saved by two ranks and loaded by one, and back",
        "the same weights, moments and prompts; losses within 1e-6",
        "engines/test_engines_fsdp.py::test_a9_a_state_of_two_ranks_loads_on_one_and_back",
        "engines/test_engines_fsdp.py::test_a9_a_run_of_two_ranks_goes_on_with_one_and_back",
        "engines/test_engines_fsdp.py::test_a9_one_process_goes_on_from_shards_and_shards_from_one_process",
    ),
    "A10": Row(
        "the next save, an error or the end comes while a save is in flight",
        "it is waited for or fails loudly; nothing partial is ever under its name",
        "engines/test_engines_fsdp_saving.py::test_a10_learning_goes_on_beside_a_save_and_the_next_one_waits",
        "engines/test_engines_fsdp_saving.py::test_a10_a_rank_that_cannot_write_fails_loudly_at_the_next_call",
        "engines/test_engines_fsdp_saving.py::test_a10_the_interpreters_end_waits_for_it",
        "engines/test_engines_fsdp_saving.py::test_a10_a_killed_driver_leaves_nothing_that_looks_whole",
        "engines/test_engines_fsdp_saving.py::test_a10_close_waits_for_it",
    ),
    "A11": Row(
        "only two are kept, and the newest is damaged",
        "damaged ones do not count: two good ones stay, across restarts",
        "runs/test_runs_checkpoint.py::test_two_good_ones_are_kept_whatever_is_damaged",
        "runs/test_runs_checkpoint.py::test_a_damaged_newest_never_costs_the_good_one",
    ),
    "A12": Row(
        "two trainings in one run folder; a lock whose owner is gone",
        "the second is refused with the first's pid, host and time; a stale lock is taken over with a note",
        "faults/test_faults_runs.py::test_A12_two_writers_and_a_stale_lock",
        "runs/test_runs_folder.py::test_a_removed_lock_file_lets_nobody_in",
    ),
    "A13": Row(
        "a run goes on with another setting, model, reward text or data",
        "refused by each difference unless it is allowed, and then it is in the run's history",
        "runs/test_runs_resume.py::test_changes_are_refused_by_name_unless_allowed_and_then_recorded",
        "faults/test_faults_files.py::test_F5_without_settings_a_resume_compares_with_its_checkpoint",
    ),
    "A14": Row(
        "a checkpoint of another format",
        "refused by its number, an older one as a newer one",
        "faults/test_faults_runs.py::test_A14_another_format_is_refused_by_version",
    ),
    "A15": Row(
        "a rank is killed, stopped, or its disk hangs, during a save",
        "the save ends at its deadline with the ranks named; nothing is published, the run goes on or stops as it was told",
        "engines/test_engines_fsdp_saving.py::test_a15_a_disk_that_hangs_ends_the_save_at_its_deadline_and_the_run_goes_on",
        "engines/test_engines_fsdp_saving.py::test_a15_a_stopped_rank",
        "engines/test_engines_fsdp_saving.py::test_a15_a_killed_rank",
        "engines/test_engines_fsdp_saving.py::test_a15_a_runs_checkpoint_is_whole_or_not_there",
    ),
    "B1": Row(
        "one of two ranks is killed in the middle of a step",
        "rank, host, pid, stage and step are named at once; the group is made anew and the numbers are the undisturbed run's",
        "cluster/test_cluster_faults.py::test_B1_a_killed_worker_is_named_in_seconds_and_the_group_is_made_anew",
        "engines/test_engines_fsdp.py::test_a_killed_worker_is_named_and_the_step_is_run_again",
        "cluster/test_cluster_engines.py::test_B17_some_steps_with_kills_at_random_end_as_the_quiet_ones",
        "runs/test_runs_recovery.py::test_B1_B2_killed_and_stopped_ranks_change_no_number",
    ),
    "B2": Row(
        "a rank is stopped inside a collective",
        "the deadline fires, says what every rank was doing, ends them all; then as B1",
        "cluster/test_cluster_faults.py::test_B2_a_call_past_its_deadline_says_what_the_ranks_were_doing",
        "cluster/test_cluster_faults.py::test_B2_a_stopped_rank_and_one_in_c_code_do_not_answer",
        "runs/test_runs_recovery.py::test_B1_B2_killed_and_stopped_ranks_change_no_number",
    ),
    "B3": Row(
        "the sampling worker is killed while it answers",
        "its questions are asked again with their seeds, each answered once; the new worker has the weights before it answers",
        "engines/test_engines_replicas.py::test_B3_a_killed_members_questions_go_to_the_other_and_it_comes_back_with_the_next_weights",
        "cluster/test_cluster_placing.py::test_B3_a_sampler_that_is_killed_is_replaced_and_no_row_is_lost_or_doubled",
        "runs/test_runs_recovery.py::test_a_lost_sampler_is_brought_back_exactly",
    ),
    "B4": Row(
        "a sampler that missed a push of weights",
        "every sample carries its version; another one than was pushed is refused",
        "engines/test_engines_replicas.py::test_B4_weights_that_were_not_taken_are_not_served",
    ),
    "B5": Row(
        "a worker answers calls and finishes nothing, or fails every question",
        "failed questions are counted apart; it is given up and the others answer",
        "engines/test_engines_replicas.py::test_B5_a_member_that_lives_and_fails_everything_is_condemned",
        "engines/test_engines_replicas.py::test_B5_a_worker_that_answers_and_never_finishes_is_given_up",
    ),
    "B6": Row(
        "a worker dies in its constructor, each time",
        "a few restarts, each later than the one before, then the first error itself",
        "engines/test_engines_replicas.py::test_B6_a_member_that_is_lost_again_and_again_is_not_started_for_ever",
        "engines/test_engines_replicas.py::test_B6_none_left_is_the_original_error",
        "cluster/test_cluster_faults.py::test_B6_a_factory_that_raises_or_dies",
        "engines/test_engines_replicas.py::test_B6_the_only_member_is_started_ever_later_and_then_no_more",
        "runs/test_runs_recovery.py::test_a_crash_loop_ends_with_its_error_and_the_run_can_be_resumed",
    ),
    "B7": Row(
        "a node is killed; a node hangs and comes back",
        "its workers are lost within seconds, a new node takes their place, and the one that comes back ends",
        "cluster/test_cluster_nodes.py::test_B7_a_lost_node_is_a_lost_worker_in_seconds_and_a_new_one_takes_its_place",
    ),
    "B8": Row(
        "a plan needs more than there is",
        "refused before anything starts, with what is needed and what there is",
        "cluster/test_cluster_faults.py::test_B8_too_much_is_refused_at_once",
    ),
    "B9": Row(
        "one row's reward never returns, by every way there is",
        "that row is ended at its limit and marked; its siblings and the pool's size stay as they were",
        "faults/test_faults_rewards.py::test_B9_one_of_256_rows_hangs_and_costs_its_own_limit_once",
        "faults/test_faults_rewards.py::test_B9_every_way_to_hang_frees_its_worker_and_the_pool_keeps_its_size",
        "faults/test_faults_workers.py::test_F6_F7_F9_whatever_a_row_does_its_siblings_are_judged_and_nothing_is_left",
        "faults/test_faults_workers.py::test_F6_a_file_that_hangs_while_it_is_loaded_is_given_up_for_all_rows",
    ),
    "B10": Row(
        "a judge's or sandbox's service fails, drops, hangs, cuts or lies",
        "tried again within bounds, then the stated policy; never a judged 0, and its share is a metric",
        "faults/test_faults_rewards.py::test_B10_an_outage_is_retried_counted_and_never_a_zero",
        "faults/test_faults_rewards.py::test_B10_what_comes_back_in_time_counts_and_the_share_is_a_metric",
        "sandbox/test_sandbox_remote.py::test_what_passes_is_tried_again_and_what_does_not_is_no_verdict",
        "sandbox/test_sandbox_remote.py::test_an_outage_is_machinery_never_a_zero",
    ),
    "B11": Row(
        "a worker eats the node's memory",
        "it is ended, for memory, with the largest users named; nothing tries again for ever, bystanders are made anew",
        "cluster/test_cluster_nodes.py::test_B11_a_worker_that_eats_memory_is_killed_for_it_by_name_and_once",
    ),
    "B12": Row(
        "the port where ranks meet is wanted by others; twenty groups start at once",
        "the port is held from its choice to its use; all twenty start",
        "cluster/test_cluster_engines.py::test_B12_the_port_is_never_free_between_its_choice_and_its_use",
        "cluster/test_cluster_engines.py::test_B12_twenty_groups_of_two_start_at_once",
        "cluster/test_cluster_engines.py::test_B16_B12_one_rank_and_two_and_one_reward_worker_and_two_are_the_same_numbers",
    ),
    "B13": Row(
        "an address that nobody, or something else, answers; a file that a dead head left",
        "said in seconds with what was found; a local cluster is always its own",
        "cluster/test_cluster_nodes.py::test_B13_what_does_not_answer_is_said_in_seconds",
        "cluster/test_cluster_nodes.py::test_B13_another_cluster_is_told_of_and_not_joined",
    ),
    "B14": Row(
        "two hundred steps through a small object store",
        "memory does not grow, and nothing sent is kept",
        "cluster/test_cluster_faults.py::test_B14_two_hundred_steps_take_no_more_memory_than_twenty",
    ),
    "B15": Row(
        "a worker writes into the batch that it was given",
        "it writes into its own copy: sender and other readers see nothing",
        "cluster/test_cluster_faults.py::test_B15_a_worker_writes_into_its_own_copy_alone",
    ),
    "B16": Row(
        "one rank with two micro-batches, two ranks with one; one and two workers for rewards and rollouts",
        "the same batch, advantages, losses and weights, bit for bit",
        "cluster/test_cluster_placing.py::test_B16_rewards_judged_by_workers_are_those_of_one_process",
        "cluster/test_cluster_engines.py::test_B16_B12_one_rank_and_two_and_one_reward_worker_and_two_are_the_same_numbers",
        "cluster/test_cluster_engines.py::test_B16_one_rollout_worker_and_two_write_the_same_rows",
    ),
    "B17": Row(
        "kills at random during hundreds of steps",
        "the weights of the quiet run; no process, port, scratch file or shared memory is left",
        "cluster/test_cluster_engines.py::test_B17_some_steps_with_kills_at_random_end_as_the_quiet_ones",
        "cluster/test_cluster_engines.py::test_B17_five_hundred_steps_with_a_kill_every_twenty_steps",
        "faults/test_faults_soak.py::test_a_run_that_meets_every_fault_once_ends_as_the_quiet_run",
        "faults/test_faults_soak.py::test_minutes_of_kills_hangs_outages_and_full_disks_end_as_the_quiet_run",
    ),
    "B18": Row(
        "everything of a session is stopped",
        "only what the session itself started: another cluster and its work go on",
        "cluster/test_cluster_faults.py::test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing",
        "cluster/test_cluster_nodes.py::test_B13_another_cluster_is_told_of_and_not_joined",
        "cluster/test_cluster_parts.py::test_what_a_killed_kernel_left_is_ended_and_what_lives_is_left_alone",
    ),
    "C1": Row(
        "the stop button during any stage",
        "the prompt is back, batch and model stand at a stage's end, and running the cell again gives the uninterrupted numbers",
        "cluster/test_cluster_faults.py::test_C1_an_interrupt_stops_the_work_and_keeps_ranks_that_all_stopped",
        "cluster/test_cluster_faults.py::test_C1_an_interrupt_leaves_no_actor_that_does_not_let_go",
        "faults/test_faults_notebooks.py::test_C1_a_stage_interrupted_again_and_again_ends_in_the_very_same_numbers",
        "faults/test_faults_notebooks.py::test_C1_an_update_interrupted_at_any_call_stands_before_it_or_after_it",
        "faults/test_faults_notebooks.py::test_C1_an_interrupt_between_two_weights_of_one_optimizer_step_is_taken_back",
    ),
    "C2": Row(
        "an interrupted or failed cell holds half a gigabyte",
        "the next stage, or one call, gives it back; until then a debugger finds it",
        "faults/test_faults_notebooks.py::test_C2_what_an_error_held_is_given_back_by_the_next_stage_or_the_helper",
        "faults/test_faults_notebooks.py::test_C2_frames_that_will_go_on_keep_what_they_hold",
    ),
    "C3": Row(
        "the kernel is killed while a cluster works",
        "nothing of it runs on; what it left is found, named and ended, and nobody else's",
        "cluster/test_cluster_faults.py::test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing",
    ),
    "C4": Row(
        "cells twice, out of order, one left out",
        "a stage refuses columns of another step, and a batch is learnt from once",
        "faults/test_faults_runs.py::test_C4_a_stage_refuses_columns_of_another_steps_batch",
        "faults/test_faults_runs.py::test_C4_a_batch_is_learnt_from_once",
        "faults/test_faults_runs.py::test_C4_a_cell_run_twice_in_a_stepper_does_nothing_twice",
        "stages/test_stages.py::test_a_chain_that_cannot_work_is_refused_and_says_which_stage_to_move",
    ),
    "C5": Row(
        "a reward, a stage or a helper that a reward calls is defined anew",
        "the new text is used and is in the batch's history, or the stepper says that it is not used and how to",
        "faults/test_faults_notebooks.py::test_C5_code_defined_anew_is_used_or_said_not_to_be",
        "faults/test_faults_notebooks.py::test_C5_a_helper_defined_anew_is_in_the_history_and_used_or_said_not_to_be",
    ),
    "C6": Row(
        "SIGTERM to a job",
        "the step ends or is taken back, a checkpoint is written, the notebook is marked, the exit code is 143, nobody is left",
        "faults/test_faults_runs.py::test_C6_sigterm_ends_the_step_checkpoints_marks_the_notebook_and_is_gone_on_with",
        "jobs/test_jobs_engine.py::test_a_signal_runs_the_cells_cleanup_and_marks_the_rest",
    ),
    "C7": Row(
        "SIGKILL of a job",
        "every finished step's metrics are there, A1 holds, nobody is left",
        "faults/test_faults_runs.py::test_C7_sigkill_of_the_job_loses_nothing_and_leaves_nobody",
        "rewards/test_rewards_functions.py::test_a_stuck_function_does_not_outlive_a_parent_that_was_killed",
    ),
    "C8": Row(
        "unknown, misspelt or hostile parameters of a notebook",
        "refused before a kernel starts; values have the notebook's types",
        "jobs/test_jobs_commands.py::test_names_are_checked_before_anything_is_injected",
        "jobs/test_jobs_runner.py::test_what_is_refused_starts_nothing",
    ),
    "C9": Row(
        "one notebook by hand, as a job, and under papermill",
        "the same metrics and weights",
        "test_notebooks.py::test_stepped_by_hand_trained_and_run_by_papermill_are_the_same_numbers",
    ),
    "C10": Row(
        "the tab is closed and the server dies during a long cell",
        "the job goes on, and its progress is read from the disk",
        "faults/test_faults_notebooks.py::test_C10_a_closed_tab_and_a_server_that_dies_stop_no_job_and_the_disk_shows_it",
    ),
    "D1": Row(
        "NaN or infinity as reward, column, KL, advantage, gradient",
        "no step is taken and no weight moves; what was bad is named with its rows, the batch is kept, and so many in a row stop",
        "faults/test_faults_data.py::test_D1_a_reward_that_is_no_number_is_that_rows_failure_and_names_function_and_row",
        "faults/test_faults_data.py::test_D1_a_poisoned_column_names_itself_and_its_rows_and_no_step_is_taken",
        "faults/test_faults_data.py::test_D1_an_estimator_that_breaks_is_named_with_its_rows",
        "faults/test_faults_data.py::test_D1_a_kl_that_is_no_number_never_reaches_the_controller",
        "faults/test_faults_data.py::test_D1_a_gradient_that_is_no_number_leaves_everything",
        "faults/test_faults_runs.py::test_D1_a_step_that_is_not_finite_stops_with_its_batch_and_a_checkpoint",
        "faults/test_faults_runs.py::test_D1_some_may_be_skipped_and_so_many_in_a_row_stop",
    ),
    "D2": Row(
        "groups of one, equal rewards, empty responses, nobody judged, all filtered",
        "advantage 0 and counted, or refused with why; never NaN",
        "faults/test_faults_data.py::test_D2_estimators_have_defined_results",
        "faults/test_faults_data.py::test_D2_a_step_in_which_all_rewards_are_equal_is_a_step",
        "faults/test_faults_data.py::test_F10_a_step_in_which_nobody_is_judged_changes_no_weight_and_says_why",
        "faults/test_faults_data.py::test_D2_all_prompts_filtered_is_said",
    ),
    "D3": Row(
        "prompts over the limit, ids beyond the vocabulary, another model's tokenizer",
        "refused by row, before training",
        "faults/test_faults_data.py::test_D3_a_prompt_over_the_limit_is_refused_by_row",
        "faults/test_faults_data.py::test_D3_a_token_id_beyond_the_vocabulary_is_refused_by_row",
        "faults/test_faults_input.py::test_models",
    ),
    "D4": Row(
        "parquet: columns missing or of a wrong type, no answers, duplicates, no rows, cut, bombs",
        "row and column are named, the decoded size is bounded, the content is hashed into the run",
        "faults/test_faults_data.py::test_D4_missing_columns_wrong_types_null_answers_no_rows",
        "faults/test_faults_data.py::test_D4_a_truncated_file_is_named",
        "faults/test_faults_data.py::test_D4_duplicates_are_counted_and_the_content_is_hashed",
        "faults/test_faults_data.py::test_D4_a_bomb_is_refused_before_it_is_decoded",
        "faults/test_faults_data.py::test_D4_a_bomb_behind_small_rows_is_refused_where_it_begins",
    ),
    "D5": Row(
        "JSON lines: NaN, 1e999, deep, endless, not UTF-8",
        "refused by line and reason in bounded memory",
        "faults/test_faults_data.py::test_D5_a_bad_line_is_named_with_its_reason",
        "faults/test_faults_data.py::test_D5_a_line_without_end_is_refused_in_bounded_memory",
    ),
    "D6": Row(
        "YAML: unknown or doubled keys at any depth, `on:`, `010`, `1e-6`, aliases and bombs",
        "typed by the notebook; what YAML reads otherwise than it is written is refused with its line, unknown names with the nearest",
        "jobs/test_jobs_commands.py::test_a_bad_file_is_refused",
        "faults/test_faults_data.py::test_D6_settings_are_typed_and_unknown_names_have_a_nearest",
        "agents/test_agents_tools.py::test_a_tool_file_that_cannot_be_used_says_why",
        "jobs/test_jobs_commands.py::test_a_file_is_typed_by_the_notebook_and_the_command_line_comes_after",
    ),
    "D7": Row(
        "the sampler has other weights than the learner, perturbed or stale",
        "measured in every step; beyond a limit the run stops before the update",
        "faults/test_faults_policies.py::test_D7_one_policy_is_measured_as_one",
        "faults/test_faults_policies.py::test_D7_perturbed_weights_are_measured_and_stop_before_the_update",
        "faults/test_faults_policies.py::test_D7_rows_of_older_weights_are_counted_in_versions_and_stop",
        "faults/test_faults_policies.py::test_D7_other_weights_stop_a_run_that_asked_for_nothing",
        "faults/test_faults_policies.py::test_D7_a_healthy_bfloat16_learner_is_far_below_the_limit",
    ),
    "D8": Row(
        "rewards of a wrong count, no number, extra keys, or that write into their input",
        "function and row are named; other rows see nothing",
        "faults/test_faults_data.py::test_D8_a_wrong_count_a_non_number_and_extra_keys",
        "faults/test_faults_data.py::test_D8_a_function_that_writes_into_its_input_changes_nobody_elses",
    ),
    "E1": Row(
        "answers that an evaluator would run, or never finish reading",
        "no text is evaluated anywhere in the tree; graders and the calculator end within bounds",
        "faults/test_faults_rewards.py::test_E1_nothing_in_the_package_evaluates_text",
        "rewards/scorers/test_scorers_math.py::test_no_scorer_runs_an_answer_or_lingers_over_it",
        "rewards/scorers/test_scorers_math.py::test_a_tower_of_powers_is_wrong_and_an_unreadable_truth_says_so",
        "agents/test_agents_tools.py::test_an_expression_without_a_value_is_a_text_for_the_model",
    ),
    "E2": Row(
        "model code: loops, forks, memory, files, output, network, secrets, daemons",
        "contained, and the verdict names the limit; nothing runs without isolation unless told so",
        "sandbox/test_sandbox_local.py::test_what_goes_over_a_limit_is_ended_and_the_limit_named",
        "sandbox/test_sandbox_local.py::test_no_way_out",
        "sandbox/test_sandbox_local.py::test_a_daemon_with_a_session_of_its_own_ends_with_its_program",
        "sandbox/test_sandbox_local.py::test_where_nothing_isolates_model_code_does_not_run_unless_said",
        "rewards/test_rewards_code.py::test_no_cheat_scores",
        "sandbox/test_sandbox_memory.py::test_no_way_of_taking_memory_goes_beyond_the_limit",
    ),
    "E3": Row(
        "a sample patches what grades it",
        "the next sample's score is untouched, and expected outputs are never in its process",
        "rewards/test_rewards_code.py::test_one_row_cannot_spoil_the_next",
        "rewards/test_rewards_code.py::test_expected_outputs_never_enter_the_models_process",
    ),
    "E4": Row(
        "files that would run code when they are read",
        "nothing is unpickled: safetensors and JSON alone, by lint and by trying every file",
        "faults/test_faults_security.py::test_E4_a_pickle_in_a_model_folder_never_runs",
        "faults/test_faults_security.py::test_E4_no_file_of_a_run_is_ever_unpickled",
        "faults/test_faults_security.py::test_E4_the_tree_has_no_door_for_pickles_or_evaluated_text",
    ),
    "E5": Row(
        "model text with markup, links, escapes, overrides, ten megabytes",
        "text in every view, table, log and exported page, in a browser too",
        "faults/test_faults_security.py::test_E5_whatever_a_model_writes_stays_text_in_every_view",
        "faults/test_faults_security.py::test_E5_ten_megabytes_in_one_line_are_cut",
        "faults/test_faults_security.py::test_E5_in_a_browser_nothing_runs_and_nothing_is_fetched",
    ),
    "E6": Row(
        "hostile names of columns, tools, stages, runs in widgets",
        "text; markup enters a page at one place, by lint",
        "faults/test_faults_looking.py::test_E6_scripts_make_text_nodes_and_markup_comes_in_at_one_place",
        "faults/test_faults_looking.py::test_E6_what_widgets_are_told_has_no_control_characters_and_a_bounded_size",
        "faults/test_faults_looking.py::test_E6_a_script_that_is_told_markup_draws_text",
    ),
    "E7": Row(
        "run, trace and data paths that lead out, or are none",
        "refused with the reason; nothing is written outside",
        "jobs/test_jobs_commands.py::test_E7_a_run_stays_where_its_name_says",
        "faults/test_faults_security.py::test_E7_data_paths_with_strange_names_are_refused_by_name",
        "faults/test_faults_security.py::test_E7_a_trace_stays_in_its_folder",
    ),
    "E8": Row(
        "a reward given as a file",
        "read only from allowed folders, run only in workers, its text and hash in the run's record",
        "faults/test_faults_rewards.py::test_E8_a_reward_file_runs_outside_the_trainer_and_is_in_the_runs_record",
        "rewards/test_rewards_functions.py::test_a_file_runs_in_workers_alone_from_allowed_folders_as_it_was_read",
    ),
    "E9": Row(
        "a model that brings code, a chat template that never ends",
        "its code is not run; templates are rendered elsewhere with limits of time and memory",
        "faults/test_faults_security.py::test_E9_a_models_own_code_is_not_run",
        "faults/test_faults_security.py::test_E9_a_hostile_template_is_refused_in_bounded_time_and_memory",
    ),
    "E10": Row(
        "the start as everybody does it",
        "training opens no port; a cluster listens on loopback with a token that its owner alone can read",
        "faults/test_faults_security.py::test_E10_training_opens_no_door",
        "cluster/test_cluster_faults.py::test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing",
        "cluster/test_cluster_faults.py::test_E10_the_line_that_we_tell_starts_no_cluster_without_a_token",
    ),
    "E11": Row(
        "a cluster's token is wrong, empty or missing, also over ray://",
        "said to be the token, within seconds",
        "cluster/test_cluster_nodes.py::test_E11_a_wrong_or_missing_token_is_said",
        "cluster/test_cluster_nodes.py::test_E11_over_ray_client_a_token_that_is_wrong_or_not_there_is_said_and_nobody_waits",
    ),
    "E12": Row(
        "a page in a browser posts to a local service, by its address or a rebound name",
        "refused, unread",
        "cluster/test_cluster_faults.py::test_E12_a_dashboard_without_its_packages_is_refused_by_name",
        "cluster/test_cluster_faults.py::test_E12_the_dashboard_refuses_what_a_page_sends",
        "sandbox/test_sandbox_remote.py::test_the_server_bounds_time_limits_refuses_pages_and_says_what_was_wrong",
    ),
    "E13": Row(
        "secrets in variables and closures",
        "in no file, notebook, log or error",
        "faults/test_faults_security.py::test_E13_a_secret_of_the_environment_is_in_nothing_that_a_run_writes",
        "faults/test_faults_security.py::test_E13_no_secret_is_in_the_record_of_a_job",
    ),
    "E14": Row(
        "a response that orders its judge to give the best mark",
        "between marks that it cannot write, cut to a length; a verdict is parsed strictly, and what is none is counted",
        "faults/test_faults_rewards.py::test_E14_a_judge_that_repeats_an_injected_verdict_has_not_judged",
        "rewards/test_rewards_judges.py::test_injected_orders_stay_between_the_marks_and_are_cut",
        "rewards/test_rewards_judges.py::test_what_is_no_verdict_is_never_one",
        "rewards/test_rewards_judges.py::test_unparseable_and_outages_are_counted_failures_after_asking_again",
    ),
    "E15": Row(
        "a saved trace from an enemy",
        "bounded in memory and time, refused by the name of its file, text as in E5",
        "faults/test_faults_traces.py::test_E15_a_poisoned_trace_costs_little_and_is_refused_by_the_name_of_its_file",
        "faults/test_faults_traces.py::test_E15_hostile_names_of_a_saved_trace_stay_text",
        "faults/test_faults_traces.py::test_E15_what_could_not_be_opened_is_not_saved",
    ),
}
HEAD = """# The scorecard of faults

Each row is a fault that tests inject, and what happens then. A ★ is a row without which nothing is released. The score is
2 where all of that happens, 1 where it is loud and stops cleanly but lacks what is named. The last column is how the tests
of a row ended when this page was made.

This page is made by `make scorecard` from `tests/faults/scorecard.py`: change that, not this. A test asserts that it is current.

| | fault | what happens | score | injected by | last run |
|---|---|---|---|---|---|
"""
NOT_RUN = "not run"


def key_of(node: str) -> str:
    """A test's id in a run as the table names it."""
    path, _, name = node.removeprefix("tests/").partition("::")
    return f"{path}::{name.rpartition('::')[2].partition('[')[0]}"


def listed() -> set[str]:
    """All tests of the table."""
    return {test for row in ROWS.values() for test in row.tests}


def page(ended: Mapping[str, Mapping[str, str]]) -> str:
    """The page. `ended`: test → case → `passed`, `FAILED`, or why it was skipped."""
    lines = []
    for name, row in ROWS.items():
        tests = "<br>".join(f"`{test.replace('::', '` `')}`" for test in row.tests)
        score = f"1: {row.lacking}" if row.lacking else "2"
        star = " ★" if name in STARS else ""
        cells = (
            f"{name}{star}",
            row.fault,
            row.promise,
            score,
            tests,
            _said([ended.get(test, {}) for test in row.tests]),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def _said(tests: list[Mapping[str, str]]) -> str:
    """How the tests of a row ended together."""
    whole = sum(bool(cases) and {*cases.values()} == {"passed"} for cases in tests)
    whys = dict.fromkeys(why for cases in tests for why in cases.values() if why != "passed")
    if not any(tests):
        return NOT_RUN
    if unrun := sum(not cases for cases in tests):
        whys[f"{unrun} {NOT_RUN}"] = None
    return f"{whole} of {len(tests)} passed" + "".join(f"; {why}" for why in whys)


def without_run(text: str) -> list[str]:
    """The lines of a page without its last column."""
    return [line.rpartition(" | ")[0] if line.startswith("| ") else line for line in text.splitlines()]


if __name__ == "__main__":
    PAGE.write_text(page({}), encoding="utf-8")
