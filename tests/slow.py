"""Which tests are slow: they run in `make long-test`, and `make test` runs a sample of their cases."""

from __future__ import annotations

from typing import Any

import pytest

# File and function → of how many cases one is in the sample; 0 for none, where other tests of the file are the sample.
SAMPLED = {
    "test_arch.py::test_a_file_that_is_no_mapping_is_one_sentence": 3,
    "test_archs.py::test_an_arch_has_the_features_whose_primitives_compile": 10,
    "test_archs.py::test_every_structure_of_a_kernel_compiles": 36,
    "test_archs.py::test_every_structure_of_a_kernel_is_right": 12,
    "test_assemble.py::test_todays_generator_and_nvcc_make_the_ptx_that_is_shipped": 0,
    "test_batch_invariant.py::test_kernels_of_one_arithmetic_give_the_same_bits": 3,
    "test_batch_invariant.py::test_kernels_of_one_arithmetic_give_the_same_codes": 2,
    "test_batch_invariant.py::test_the_variable_is_the_default": 3,
    "test_bundle.py::test_a_change_of_any_value_is_noticed": 3,
    "test_bundle.py::test_the_shipped_bundles_are_sound": 11,
    "test_bundle.py::test_the_shipped_winners_keep_their_bounds_and_are_legal": 11,
    "test_bundle_damage.py::test_no_damage_gets_past_the_checks": 4,
    "test_calls.py::test_what_a_process_pays_once": 0,
    "test_cli.py::test_a_bare_install_chooses_kernels_and_names_the_extra_for_the_rest": 0,
    "test_cli_emit.py::test_a_standalone_kernel_compiles_by_its_own_command_to_the_very_same_code": 3,
    "test_compat.py::test_compile_without_graph_break": 3,
    "test_costmodel.py::test_an_estimate_is_verified_and_says_that_it_is_one": 2,
    "test_costmodel.py::test_estimates_of_whole_rows_are_near_what_was_measured": 6,
    "test_costmodel.py::test_the_longest_rows_are_verified_with_every_class_of_input": 0,
    "test_costmodel.py::test_the_shortlist_begins_with_the_best_of_each_regime": 0,
    "test_costmodel.py::test_where_memory_is_the_limit_bytes_make_the_time": 3,
    "test_cubin.py::test_those_that_are_shipped_load_in_every_driver_of_cuda_12": 0,
    "test_disturbed.py::test_a_kernel_that_takes_too_long_while_others_run_has_not_hung": 2,
    "test_docs.py::test_the_readme_and_the_picture_are_up_to_date": 0,
    "test_emulator.py::test_an_exchange_with_lanes_is_free_of_bank_conflicts_and_stores_whole_sectors": 4,
    "test_emulator.py::test_an_infinity_stays_in_its_row": 4,
    "test_emulator.py::test_nan_comes_out_as_nan_and_an_infinity_as_nan_where_values_are_taken_apart": 4,
    "test_emulator.py::test_so_is_one_that_brings_bits_to_an_mma": 4,
    "test_emulator.py::test_variants_are_right": 6,
    "test_examples.py::test_a_rotated_model_is_the_same_and_loses_less": 0,
    "test_examples.py::test_attention_loses_less_with_a_rotation": 0,
    "test_extremes.py::test_the_edges_of_a_type": 7,
    "test_far_bits.py::test_groups_are_as_small_as_chunks_that_meet_from_the_exchange_on": 5,
    "test_fleet.py::test_a_fleet_of_two_classes_finds_winners_for_each_whatever_a_worker_does": 0,
    "test_fleet_kills.py::test_a_fleet_loses_nothing_whatever_breaks": 0,
    "test_fleet_network.py::test_a_local_fleet_has_tls_where_dask_requires_it": 0,
    "test_fleet_network.py::test_a_scheduler_beyond_loopback_without_tls_brings_a_warning": 5,
    "test_fleet_network.py::test_an_address_of_another_protocol_is_refused_in_a_sentence": 0,
    "test_fleet_network.py::test_every_process_of_a_local_fleet_listens_on_loopback_alone": 0,
    "test_fleet_network.py::test_only_a_client_with_the_certificate_of_the_fleet_reaches_it": 0,
    "test_host_compiler.py::test_a_damaged_library_is_built_again": 3,
    "test_hosts.py::test_accelerate_loads_a_checkpoint": 4,
    "test_hosts.py::test_two_processes_keep_the_map": 0,
    "test_hung_compilers.py::test_a_hung_compiler_does_not_hang_a_tune": 9,
    "test_kills.py::test_a_tune_that_is_killed_at_random_moments_ends_like_one_that_was_not": 0,
    "test_laws.py::test_a_law_of_codes_that_a_kernel_breaks_is_named": 3,
    "test_long_rows.py::test_what_is_shipped_for_long_rows_is_right": 20,
    "test_merge.py::test_merging_a_shipped_bundle_with_itself_changes_nothing": 0,
    "test_mutations.py::test_a_broken_primitive_is_caught": 6,
    "test_mutations.py::test_a_kernel_broken_anywhere_is_caught": 0,
    "test_overlap.py::test_as_a_count_of_all_places_says": 0,
    "test_plan.py::test_every_n_equals_the_explicit_matrix": 8,
    "test_postgres.py::test_a_database_of_every_earlier_schema_is_upgraded": 4,
    "test_postgres.py::test_of_eight_tuners_that_begin_at_once_one_is_killed_and_the_others_go_on": 0,
    "test_presets.py::test_heads_compile_without_a_break": 2,
    "test_presets.py::test_presets_compile_without_a_break": 6,
    "test_quantize.py::test_compiled_calls_rotate_small_blocks_too": 4,
    "test_quantize.py::test_largest_magnitudes": 3,
    "test_quantize.py::test_one_compiled_call_takes_every_scale": 2,
    "test_quantize.py::test_out_compiles_without_a_break": 4,
    "test_quantize.py::test_permuted_rows_compile": 4,
    "test_quantize.py::test_scales_of_heads": 5,
    "test_quantize.py::test_small_blocks_are_rotated_too": 5,
    "test_quantize.py::test_zeros_by_the_scale_of_their_largest_magnitude": 5,
    "test_quantized.py::test_types_of_pytorch_are_taken": 10,
    "test_quantizer.py::test_codes_and_scales_are_those_of_the_definition": 3,
    "test_quantizing_kernels.py::test_a_scale_of_zero": 2,
    "test_quantizing_kernels.py::test_hard_values_of_every_format_and_rule": 3,
    "test_quantizing_kernels.py::test_sums_beyond_float16_do_not_overflow": 2,
    "test_recording.py::test_an_interrupted_recording_goes_on_where_it_was": 3,
    "test_recording.py::test_bad_usage_is_a_sentence": 3,
    "test_refine.py::test_calls_lose_nothing_at_any_count_that_was_looked_at": 0,
    "test_replay.py::test_curves_never_fall_and_a_seed_has_one": 0,
    "test_report_page.py::test_the_largest_shipped_bundle_fits_in_a_page_that_fetches_nothing": 0,
    "test_resume.py::test_a_killed_search_ends_like_one_that_was_not": 3,
    "test_rotate_operator.py::test_every_check_of_an_operator": 3,
    "test_rotate_operator.py::test_gradients_of_every_named_matrix": 4,
    "test_rotation.py::test_a_row_gives_the_same_bits_in_every_batch": 3,
    "test_rotation.py::test_every_named_matrix_against_float64": 3,
    "test_rotation.py::test_types_inverses_and_norms": 4,
    "test_runtime_operator.py::test_compile_tangents": 3,
    "test_runtime_operator.py::test_derivatives": 3,
    "test_runtime_operator.py::test_every_check_of_an_operator": 3,
    "test_runtime_quantize.py::test_a_kernel_writes_into_out": 3,
    "test_runtime_quantize.py::test_warmup_finds_what_calls_find": 3,
    "test_space.py::test_accurate_codes_are_of_values_with_16_bits": 5,
    "test_space.py::test_every_choice_is_legal_or_has_a_reason": 4,
    "test_space.py::test_no_knob_that_is_chosen_after_a_rule_was_asked_has_a_say": 5,
    "test_space.py::test_no_two_legal_choices_mean_the_same_plan": 4,
    "test_space.py::test_seeds_are_legal_and_of_every_shape": 4,
    "test_space.py::test_seeds_of_clusters_load_whole_rows_too": 0,
    "test_space.py::test_seeds_take_values_into_an_mma_as_proved_good": 2,
    "test_space.py::test_what_is_legal_fits_the_limits": 5,
    "test_store_files.py::test_damaged_rows_are_refused": 3,
    "test_toolchain.py::test_the_death_of_a_compiler_says_nothing_of_a_source": 5,
    "test_traces.py::test_compiled_calls_have_the_derivatives_that_are_asked_for": 4,
    "test_traces.py::test_one_compilation_takes_all_numbers_of_rows": 12,
    "test_traces.py::test_one_export_takes_all_numbers_of_rows": 5,
    "test_transfer.py::test_an_arch_without_a_feature_has_other_winners": 4,
    "test_transfer.py::test_equal_sources_give_equal_bytes": 0,
    "test_transfer.py::test_every_shipped_recipe_renders_and_is_marked": 10,
    "test_transfer.py::test_shipped_recipes_compile_where_they_are_called": 5,
    "test_transfer.py::test_the_shipped_winners_cover_every_bucket_of_what_is_legal": 0,
    "test_tuner.py::test_same_seed_and_same_answers_give_the_same_search": 0,
    "test_verify.py::test_a_correct_kernel_passes": 3,
    "test_verify.py::test_a_kernel_that_is_wrong_about_pitched_rows_is_found": 3,
    "test_verify.py::test_a_wrong_kernel_is_found": 3,
    "test_verify_codes.py::test_what_is_right_is_found_right": 3,
    "test_verify_codes.py::test_what_is_wrong_is_found_wrong": 3,
    "test_wheel.py::test_a_bare_install_looks_up_and_inspects": 0,
    "test_wheel.py::test_a_bare_install_transforms_compiles_and_chooses": 0,
    "test_wheel.py::test_every_file_of_every_room_is_in_the_wheel": 0,
    "test_wheel.py::test_the_bundles_of_a_release_are_signed": 0,
    "test_wheel.py::test_the_wheel_is_small_and_for_every_platform": 0,
    "test_wheel.py::test_what_tunes_names_the_extra_it_needs": 0,
    "test_wide_mma.py::test_a_value_of_11_bits_stays_as_it_is_lifted_and_cut_off": 0,
}


def slow_cases(tests: list[str]) -> set[int]:
    """The indexes of slow tests among these, which are named as by pytest: "tests/test_plan.py::test_a_row[a case]"."""
    before: dict[str, int] = {}
    slow = set()
    for at, test in enumerate(tests):
        name = test.partition("[")[0].rpartition("/")[2]
        if name in SAMPLED:
            number = before[name] = before.get(name, -1) + 1
            if not SAMPLED[name] or number % SAMPLED[name]:
                slow.add(at)
    return slow


def cases_of(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter with which this session calls tests of the module: all that a fixture has to build."""
    of_module = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return list(dict.fromkeys(item.callspec.params[name] for item in of_module if name in item.callspec.params))
