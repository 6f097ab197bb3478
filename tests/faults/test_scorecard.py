"""Which test injects which fault: the rows of the fault list that one process can meet, and where each is held to it.

A checkpoints and resume · B rewards · C notebooks and jobs · D bad data and numerics · E security. A row whose tests are gone or renamed
fails here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS: dict[str, list[str]] = {
    "A1 kill -9 between checkpoints": ["runs/test_resume.py::test_killed_and_resumed_is_identical"],
    "A2 kill -9 at every write boundary": [
        "runs/test_runs_checkpoint.py::test_killed_at_every_write_boundary_a_good_one_stands_and_can_be_gone_on_from",
        "runs/test_resume.py::test_killed_and_resumed_is_identical",
    ],
    "A3 a flipped bit": [
        "faults/test_faults_runs.py::test_A3_A4_damage_to_any_file_of_the_newest_is_named_and_the_one_before_is_taken",
        "runs/test_resume.py::test_a_flipped_bit_falls_back_to_the_checkpoint_before",
        "runs/test_runs_checkpoint.py::test_no_flipped_bit_of_the_manifest_is_believed",
    ],
    "A4 truncated, deleted": [
        "faults/test_faults_runs.py::test_A3_A4_damage_to_any_file_of_the_newest_is_named_and_the_one_before_is_taken",
        "faults/test_faults_runs.py::test_A4_never_from_scratch_without_being_told",
    ],
    "A5 a stale pointer": ["runs/test_runs_checkpoint.py::test_foreign_names_in_the_folder_are_left_alone"],
    "A6 a full disk": [
        "faults/test_faults_runs.py::test_A6_a_full_disk_stops_loudly_and_hurts_nothing",
        "runs/test_runs_checkpoint.py::test_a_full_disk_is_said_and_hurts_nothing",
    ],
    "A7 an epoch's end, the last step, none left": [
        "faults/test_faults_runs.py::test_A7_an_epochs_end_loses_and_repeats_nothing",
        "runs/test_resume.py::test_nothing_left_to_do_and_more_to_do",
    ],
    "A8 an item of state missing": [
        "runs/test_runs_resume.py::test_each_part_of_the_state_matters",
        "runs/test_runs_resume.py::test_a_checkpoint_that_lacks_something_is_refused",
    ],
    "A11 retention with a damaged newest": [
        "runs/test_runs_checkpoint.py::test_two_good_ones_are_kept_whatever_is_damaged",
        "runs/test_runs_checkpoint.py::test_a_damaged_newest_never_costs_the_good_one",
    ],
    "A12 two writers": ["faults/test_faults_runs.py::test_A12_two_writers_and_a_stale_lock"],
    "A13 changed settings": [
        "runs/test_runs_resume.py::test_changes_are_refused_by_name_unless_allowed_and_then_recorded"
    ],
    "A14 another format": ["faults/test_faults_runs.py::test_A14_another_format_is_refused_by_version"],
    "B9 a reward that never returns": [
        "faults/test_faults_rewards.py::test_B9_one_of_256_rows_hangs_and_costs_its_own_limit_once",
        "faults/test_faults_rewards.py::test_B9_every_way_to_hang_frees_its_worker_and_the_pool_keeps_its_size",
    ],
    "B10 a reward service that is down": [
        "faults/test_faults_rewards.py::test_B10_an_outage_is_retried_counted_and_never_a_zero",
        "faults/test_faults_rewards.py::test_B10_what_comes_back_in_time_counts_and_the_share_is_a_metric",
        "sandbox/test_sandbox_remote.py::test_what_passes_is_tried_again_and_what_does_not_is_no_verdict",
        "sandbox/test_sandbox_remote.py::test_an_outage_is_machinery_never_a_zero",
    ],
    "A9 another number of ranks": [
        "engines/test_engines_fsdp.py::test_a9_a_state_of_two_ranks_loads_on_one_and_back",
        "engines/test_engines_fsdp.py::test_a9_a_run_of_two_ranks_goes_on_with_one_and_back",
        "engines/test_engines_fsdp.py::test_a9_one_process_goes_on_from_shards_and_shards_from_one_process",
    ],
    "A10 a save in flight": [
        "engines/test_engines_fsdp_saving.py::test_a10_learning_goes_on_beside_a_save_and_the_next_one_waits",
        "engines/test_engines_fsdp_saving.py::test_a10_a_rank_that_cannot_write_fails_loudly_at_the_next_call",
        "engines/test_engines_fsdp_saving.py::test_a10_the_interpreters_end_waits_for_it",
        "engines/test_engines_fsdp_saving.py::test_a10_a_killed_driver_leaves_nothing_that_looks_whole",
        "engines/test_engines_fsdp_saving.py::test_a10_close_waits_for_it",
    ],
    "A15 a rank that hangs or dies while it saves": [
        "engines/test_engines_fsdp_saving.py::test_a15_a_disk_that_hangs_ends_the_save_at_its_deadline_and_the_run_goes_on",
        "engines/test_engines_fsdp_saving.py::test_a15_a_stopped_rank",
        "engines/test_engines_fsdp_saving.py::test_a15_a_killed_rank",
        "engines/test_engines_fsdp_saving.py::test_a15_a_runs_checkpoint_is_whole_or_not_there",
    ],
    "B3 a sampler killed": [
        "engines/test_engines_replicas.py::test_B3_a_killed_members_questions_go_to_the_other_and_it_comes_back_with_the_next_weights",
        "cluster/test_cluster_placing.py::test_B3_a_sampler_that_is_killed_is_replaced_and_no_row_is_lost_or_doubled",
    ],
    "B4 a sampler with old weights": [
        "engines/test_engines_replicas.py::test_B4_weights_that_were_not_taken_are_not_served"
    ],
    "B5 a worker that lives and finishes nothing": [
        "engines/test_engines_replicas.py::test_B5_a_member_that_lives_and_fails_everything_is_condemned",
        "engines/test_engines_replicas.py::test_B5_a_worker_that_answers_and_never_finishes_is_given_up",
    ],
    "B1 a worker killed": [
        "cluster/test_cluster_faults.py::test_B1_a_killed_worker_is_named_in_seconds_and_the_group_is_made_anew",
        "engines/test_engines_fsdp.py::test_a_killed_worker_is_named_and_the_step_is_run_again",
        "cluster/test_cluster_engines.py::test_B17_some_steps_with_kills_at_random_end_as_the_quiet_ones",
    ],
    "B2 a worker that hangs": [
        "cluster/test_cluster_faults.py::test_B2_a_call_past_its_deadline_says_what_the_ranks_were_doing",
        "cluster/test_cluster_faults.py::test_B2_a_stopped_rank_and_one_in_c_code_do_not_answer",
    ],
    "B6 a worker that dies in its constructor": [
        "engines/test_engines_replicas.py::test_B6_a_member_that_is_lost_again_and_again_is_not_started_for_ever",
        "engines/test_engines_replicas.py::test_B6_none_left_is_the_original_error",
        "cluster/test_cluster_faults.py::test_B6_a_factory_that_raises_or_dies",
    ],
    "B7 a node lost, hung, replaced": [
        "cluster/test_cluster_nodes.py::test_B7_a_lost_node_is_a_lost_worker_in_seconds_and_a_new_one_takes_its_place"
    ],
    "B8 not enough resources": ["cluster/test_cluster_faults.py::test_B8_too_much_is_refused_at_once"],
    "B11 a worker that eats memory": [
        "cluster/test_cluster_nodes.py::test_B11_a_worker_that_eats_memory_is_killed_for_it_by_name_and_once"
    ],
    "B12 where ranks meet": [
        "cluster/test_cluster_engines.py::test_B12_the_port_is_never_free_between_its_choice_and_its_use",
        "cluster/test_cluster_engines.py::test_B12_twenty_groups_of_two_start_at_once",
        "cluster/test_cluster_engines.py::test_B16_B12_one_rank_and_two_and_one_reward_worker_and_two_are_the_same_numbers",
    ],
    "B13 dead addresses": [
        "cluster/test_cluster_nodes.py::test_B13_what_does_not_answer_is_said_in_seconds",
        "cluster/test_cluster_nodes.py::test_B13_another_cluster_is_told_of_and_not_joined",
    ],
    "B14 the object store over many steps": [
        "cluster/test_cluster_faults.py::test_B14_two_hundred_steps_take_no_more_memory_than_twenty"
    ],
    "B15 a worker that writes into its batch": [
        "cluster/test_cluster_faults.py::test_B15_a_worker_writes_into_its_own_copy_alone"
    ],
    "B16 however many there are": [
        "cluster/test_cluster_placing.py::test_B16_rewards_judged_by_workers_are_those_of_one_process",
        "cluster/test_cluster_engines.py::test_B16_B12_one_rank_and_two_and_one_reward_worker_and_two_are_the_same_numbers",
        "cluster/test_cluster_engines.py::test_B16_one_rollout_worker_and_two_write_the_same_rows",
    ],
    "B17 a soak with kills": [
        "cluster/test_cluster_engines.py::test_B17_some_steps_with_kills_at_random_end_as_the_quiet_ones",
        "cluster/test_cluster_engines.py::test_B17_five_hundred_steps_with_a_kill_every_twenty_steps",
    ],
    "B18 stops only what it started": [
        "cluster/test_cluster_faults.py::test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing",
        "cluster/test_cluster_nodes.py::test_B13_another_cluster_is_told_of_and_not_joined",
        "cluster/test_cluster_parts.py::test_what_a_killed_kernel_left_is_ended_and_what_lives_is_left_alone",
    ],
    "C3 a killed kernel": [
        "cluster/test_cluster_faults.py::test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing"
    ],
    "C1 an interrupted stage": [
        "cluster/test_cluster_faults.py::test_C1_an_interrupt_stops_the_work_and_keeps_ranks_that_all_stopped",
        "cluster/test_cluster_faults.py::test_C1_an_interrupt_leaves_no_actor_that_does_not_let_go",
        "faults/test_faults_notebooks.py::test_C1_a_stage_interrupted_again_and_again_ends_in_the_very_same_numbers",
        "faults/test_faults_notebooks.py::test_C1_an_update_interrupted_at_any_call_stands_before_it_or_after_it",
        "faults/test_faults_notebooks.py::test_C1_an_interrupt_between_two_weights_of_one_optimizer_step_is_taken_back",
    ],
    "C2 memory that an error holds": [
        "faults/test_faults_notebooks.py::test_C2_what_an_error_held_is_given_back_by_the_next_stage_or_the_helper",
        "faults/test_faults_notebooks.py::test_C2_frames_that_will_go_on_keep_what_they_hold",
    ],
    "C4 cells twice, out of order, left out": [
        "faults/test_faults_runs.py::test_C4_a_stage_refuses_columns_of_another_steps_batch",
        "faults/test_faults_runs.py::test_C4_a_batch_is_learnt_from_once",
        "faults/test_faults_runs.py::test_C4_a_cell_run_twice_in_a_stepper_does_nothing_twice",
        "stages/test_stages.py::test_a_chain_that_cannot_work_is_refused_and_says_which_stage_to_move",
    ],
    "C5 code defined anew": ["faults/test_faults_notebooks.py::test_C5_code_defined_anew_is_used_or_said_not_to_be"],
    "C6 SIGTERM": [
        "faults/test_faults_runs.py::test_C6_sigterm_ends_the_step_checkpoints_marks_the_notebook_and_is_gone_on_with",
        "jobs/test_jobs_engine.py::test_a_signal_runs_the_cells_cleanup_and_marks_the_rest",
    ],
    "C7 SIGKILL": [
        "faults/test_faults_runs.py::test_C7_sigkill_of_the_job_loses_nothing_and_leaves_nobody",
        "rewards/test_rewards_functions.py::test_a_stuck_function_does_not_outlive_a_parent_that_was_killed",
    ],
    "C8 parameters": [
        "jobs/test_jobs_commands.py::test_names_are_checked_before_anything_is_injected",
        "jobs/test_jobs_runner.py::test_what_is_refused_starts_nothing",
    ],
    "C9 by hand and by papermill": [
        "test_notebooks.py::test_stepped_by_hand_trained_and_run_by_papermill_are_the_same_numbers"
    ],
    "C10 tab closed, server gone": [
        "faults/test_faults_notebooks.py::test_C10_a_closed_tab_and_a_server_that_dies_stop_no_job_and_the_disk_shows_it"
    ],
    "D1 NaN and infinity": [
        "faults/test_faults_data.py::test_D1_a_reward_that_is_no_number_is_that_rows_failure_and_names_function_and_row",
        "faults/test_faults_data.py::test_D1_a_poisoned_column_names_itself_and_its_rows_and_no_step_is_taken",
        "faults/test_faults_data.py::test_D1_an_estimator_that_breaks_is_named_with_its_rows",
        "faults/test_faults_data.py::test_D1_a_kl_that_is_no_number_never_reaches_the_controller",
        "faults/test_faults_data.py::test_D1_a_gradient_that_is_no_number_leaves_everything",
        "faults/test_faults_runs.py::test_D1_a_step_that_is_not_finite_stops_with_its_batch_and_a_checkpoint",
        "faults/test_faults_runs.py::test_D1_some_may_be_skipped_and_so_many_in_a_row_stop",
    ],
    "D2 nothing to learn from": [
        "faults/test_faults_data.py::test_D2_estimators_have_defined_results",
        "faults/test_faults_data.py::test_D2_a_step_in_which_all_rewards_are_equal_is_a_step",
        "faults/test_faults_data.py::test_F10_a_step_in_which_nobody_is_judged_changes_no_weight_and_says_why",
        "faults/test_faults_data.py::test_D2_all_prompts_filtered_is_said",
    ],
    "D3 prompts and ids": [
        "faults/test_faults_data.py::test_D3_a_prompt_over_the_limit_is_refused_by_row",
        "faults/test_faults_data.py::test_D3_a_token_id_beyond_the_vocabulary_is_refused_by_row",
        "faults/test_faults_input.py::test_models",
    ],
    "D4 parquet": [
        "faults/test_faults_data.py::test_D4_missing_columns_wrong_types_null_answers_no_rows",
        "faults/test_faults_data.py::test_D4_a_truncated_file_is_named",
        "faults/test_faults_data.py::test_D4_duplicates_are_counted_and_the_content_is_hashed",
        "faults/test_faults_data.py::test_D4_a_bomb_is_refused_before_it_is_decoded",
    ],
    "D5 JSON lines": [
        "faults/test_faults_data.py::test_D5_a_bad_line_is_named_with_its_reason",
        "faults/test_faults_data.py::test_D5_a_line_without_end_is_refused_in_bounded_memory",
    ],
    "D6 YAML and settings": [
        "jobs/test_jobs_commands.py::test_a_bad_file_is_refused",
        "faults/test_faults_data.py::test_D6_settings_are_typed_and_unknown_names_have_a_nearest",
    ],
    "D7 another policy": [
        "faults/test_faults_policies.py::test_D7_one_policy_is_measured_as_one",
        "faults/test_faults_policies.py::test_D7_perturbed_weights_are_measured_and_stop_before_the_update",
        "faults/test_faults_policies.py::test_D7_rows_of_older_weights_are_counted_in_versions_and_stop",
    ],
    "D8 rewards that break their contract": [
        "faults/test_faults_data.py::test_D8_a_wrong_count_a_non_number_and_extra_keys",
        "faults/test_faults_data.py::test_D8_a_function_that_writes_into_its_input_changes_nobody_elses",
    ],
    "E1 text that would be evaluated": [
        "faults/test_faults_rewards.py::test_E1_nothing_in_the_package_evaluates_text",
        "rewards/scorers/test_scorers_math.py::test_no_scorer_runs_an_answer_or_lingers_over_it",
        "rewards/scorers/test_scorers_math.py::test_a_tower_of_powers_loses_its_row_and_an_unreadable_truth_says_so",
    ],
    "E2 model code": [
        "sandbox/test_sandbox_local.py::test_what_goes_over_a_limit_is_ended_and_the_limit_named",
        "sandbox/test_sandbox_local.py::test_no_way_out",
        "sandbox/test_sandbox_local.py::test_a_daemon_with_a_session_of_its_own_ends_with_its_program",
        "sandbox/test_sandbox_local.py::test_where_nothing_isolates_model_code_does_not_run_unless_said",
        "rewards/test_rewards_code.py::test_no_cheat_scores",
    ],
    "E3 a sample that patches the grader": [
        "rewards/test_rewards_code.py::test_one_row_cannot_spoil_the_next",
        "rewards/test_rewards_code.py::test_expected_outputs_never_enter_the_models_process",
    ],
    "E4 files that would run": [
        "faults/test_faults_security.py::test_E4_a_pickle_in_a_model_folder_never_runs",
        "faults/test_faults_security.py::test_E4_no_file_of_a_run_is_ever_unpickled",
        "faults/test_faults_security.py::test_E4_the_tree_has_no_door_for_pickles_or_evaluated_text",
    ],
    "E5 model text": [
        "faults/test_faults_security.py::test_E5_whatever_a_model_writes_stays_text_in_every_view",
        "faults/test_faults_security.py::test_E5_ten_megabytes_in_one_line_are_cut",
        "faults/test_faults_security.py::test_E5_in_a_browser_nothing_runs_and_nothing_is_fetched",
    ],
    "E8 a reward by its file": [
        "faults/test_faults_rewards.py::test_E8_a_reward_file_runs_outside_the_trainer_and_is_in_the_runs_record",
        "rewards/test_rewards_functions.py::test_a_file_runs_in_workers_alone_from_allowed_folders_as_it_was_read",
    ],
    "E14 orders in what a judge reads": [
        "faults/test_faults_rewards.py::test_E14_a_judge_that_repeats_an_injected_verdict_has_not_judged",
        "rewards/test_rewards_judges.py::test_injected_orders_stay_between_the_marks_and_are_cut",
        "rewards/test_rewards_judges.py::test_what_is_no_verdict_is_never_one",
    ],
    "E6 widgets and hostile names": [
        "faults/test_faults_looking.py::test_E6_scripts_make_text_nodes_and_markup_comes_in_at_one_place",
        "faults/test_faults_looking.py::test_E6_what_widgets_are_told_has_no_control_characters_and_a_bounded_size",
        "faults/test_faults_looking.py::test_E6_a_script_that_is_told_markup_draws_text",
    ],
    "E15 a poisoned trace": [
        "faults/test_faults_traces.py::test_E15_a_poisoned_trace_costs_little_and_is_refused_by_the_name_of_its_file",
        "faults/test_faults_traces.py::test_E15_hostile_names_of_a_saved_trace_stay_text",
        "faults/test_faults_traces.py::test_E15_what_could_not_be_opened_is_not_saved",
    ],
    "E7 paths": [
        "jobs/test_jobs_commands.py::test_E7_a_run_stays_where_its_name_says",
        "faults/test_faults_security.py::test_E7_data_paths_with_strange_names_are_refused_by_name",
        "faults/test_faults_security.py::test_E7_a_trace_stays_in_its_folder",
    ],
    "E9 models and templates": [
        "faults/test_faults_security.py::test_E9_a_models_own_code_is_not_run",
        "faults/test_faults_security.py::test_E9_a_hostile_template_is_refused_in_bounded_time_and_memory",
    ],
    "E10 nothing listens": [
        "faults/test_faults_security.py::test_E10_training_opens_no_door",
        "cluster/test_cluster_faults.py::test_C3_E10_a_first_start_listens_on_loopback_with_a_token_of_its_own_and_a_killed_kernel_leaves_nothing",
        "cluster/test_cluster_faults.py::test_E10_the_line_that_we_tell_starts_no_cluster_without_a_token",
    ],
    "E11 tokens": ["cluster/test_cluster_nodes.py::test_E11_a_wrong_or_missing_token_is_said"],
    "E12 a page in a browser": [
        "cluster/test_cluster_faults.py::test_E12_a_dashboard_without_its_packages_is_refused_by_name",
        "cluster/test_cluster_faults.py::test_E12_the_dashboard_refuses_what_a_page_sends",
    ],
    "E13 secrets": [
        "faults/test_faults_security.py::test_E13_a_secret_of_the_environment_is_in_nothing_that_a_run_writes",
        "faults/test_faults_security.py::test_E13_no_secret_is_in_the_record_of_a_job",
    ],
    "a soak": [
        "faults/test_faults_runs.py::test_some_hundred_steps_interrupted_killed_and_resumed_at_random_end_as_the_quiet_run"
    ],
}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_tests(row: str) -> None:
    assert ROWS[row]
    for place in ROWS[row]:
        path, name = place.split("::")
        tree = ast.parse((TESTS / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place
