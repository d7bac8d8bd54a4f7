"""Guards: every oracle has a quick case, and every mutant of the catalogue can be planted."""

import ast

import pytest

from benchmarks.mutants import _catalogue, _run
from benchmarks.mutants.__main__ import REPO
from tests.support.paths import ROOT

ORACLES = """
algorithms/test_block_grid: test_rows_come_back_to_the_bit
algorithms/test_random: test_as_the_oracle
algorithms/test_block_table: test_any_sequence_of_calls
checkpoint/test_save: test_sums_are_those_of_plain_python
host/test_codecs: test_bits_round_trip
core/test_slots: test_rings_are_those_of_lists
formats/test_checkpoint_faults: test_any_sequence_of_saves_kills_and_damage
samplers/test_consume: test_no_row_is_drawn_too_often test_every_row_is_as_likely_as_every_other
storages/test_deduplicated: test_rows_and_references_are_right_after_any_calls
host/test_file_columns: test_any_sequence_of_calls_agrees_with_a_dict test_a_failed_write_leaves_the_store_unchanged
samplers/test_epoch: test_programs test_everyone_is_as_likely_at_every_place_and_so_is_every_pair
views/test_hindsight: test_goals_are_of_the_same_episode
test_limits: test_the_arithmetic_is_that_of_fractions test_reverb_cases_give_reverb_answers
members/test_quota: test_quotas_are_those_of_the_largest_remainder test_sources_at_random_have_their_chances
contracts/test_model: test_every_method_does_what_the_model_does test_convert_keeps_rows_and_finds_their_anchors
host/test_pairs: test_any_sequence_of_steps_agrees_with_a_list
host/test_stacked: test_any_sequence_of_calls_agrees_with_a_dict
host/test_slot_map: test_any_sequence_of_calls_agrees_with_a_dict
host/test_read_ahead: test_collect_returns_the_rows_at_the_request
storages/test_ragged: test_rows_are_those_of_a_plain_list
host/test_recovery: test_longest_valid_run_agrees_with_a_search test_a_checksum_covers_row_place_and_store
replay/test_replay: test_actors_and_learners_lose_and_double_no_row
writers/test_reservoir: test_rows_are_where_algorithm_r_puts_them test_every_set_of_rows_is_equally_likely
checkpoint/test_snapshot: test_marks_tell_the_truth_and_snapshots_stay
samplers/test_staleness: test_chances_by_version test_chances_by_age
host/test_store: test_any_sequence_of_calls_agrees_with_a_dict
buffer/test_summary: test_every_number_is_that_of_plain_python
algorithms/test_sum_tree: test_set_is_what_a_plain_array_does sum_tree.check_strata sum_tree.check_frequencies
writers/test_topk: test_what_sorting_all_rows_would_leave_stays
transforms/test_transforms: test_running_statistics test_reward_to_go
views/test_transition: test_transitions_equal_accumulating_before_storing
contracts/test_uniformity: test_uniform_rows uniformity.check_prioritized
views/test_windows: test_every_window_or_episode_is_as_likely_as_every_other
"""


def test_every_oracle_has_a_quick_case() -> None:
    for line in ORACLES.strip().splitlines():
        module, names = line.split(": ")
        nodes = list(ast.walk(ast.parse((ROOT / "tests" / f"{module}.py").read_text())))
        there = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        there |= {ast.unparse(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
        assert set(names.split()) <= there, f"tests/{module}.py lacks {set(names.split()) - there}"


@pytest.mark.more
def test_every_mutant_of_the_catalogue_can_be_planted():
    mutants = _catalogue.read()
    assert not _catalogue.check(mutants, _catalogue.Package(REPO / "fbuf"), _run.Tests(REPO).topics)
    assert len(mutants) >= 210
