"""What users of other copy tools complain about: each complaint is a behaviour here, and names its tests.

The table is the list; this file only sees to it that no test of it disappears, and adds the few that have no
better place.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from datasync.replicate import replicate, transfer
from datasync.replicate.verify import verify
from datasync.storage.local import LocalStore
from tests.replicate.kit import QUICK, Spy, data_of, make_dataset

TESTS = Path(__file__).resolve().parents[1]

# complaint: tests, as file::function below tests/
COMPLAINTS = {
    "a listing that fails lets --delete empty the destination": [
        "replicate/test_replicate.py::test_a_listing_that_fails_is_never_taken_for_a_whole_one",
        "storage/test_s3.py::test_a_listing_that_cannot_go_on_is_an_error",
    ],
    "an empty or unmounted source wipes the copy": [
        "replicate/test_replicate.py::test_an_empty_or_absent_source_is_refused",
        "replicate/test_replicate.py::test_deleting_needs_a_receipt_and_keeps_to_its_share",
        "storage/test_local.py::test_a_missing_root_is_no_empty_one",
    ],
    "same size, other content: skipped": [
        "replicate/test_plan.py::test_same_size_and_other_content_is_copied",
        "replicate/test_replicate.py::test_a_file_rewritten_in_place_with_its_size_and_time_is_noticed",
    ],
    "unchanged files copied again for their time": [
        "replicate/test_replicate.py::test_a_tree_copies_only_what_changed",
        "replicate/test_plan.py::test_same_content_is_not_copied_whatever_its_tag",
    ],
    "damage at the destination is never noticed": [
        "replicate/test_verify.py::test_damage_is_named_quarantined_and_recorded",
        "replicate/test_verify.py::test_repair_brings_back_exactly_what_is_damaged",
        "replicate/test_verify.py::test_the_next_replication_mends_what_verify_found",
    ],
    "the ETag of a multipart object is no digest": [
        "replicate/test_pains.py::test_an_object_sent_in_parts_is_verified_and_passed_on_by_its_own_digest",
    ],
    "new default checksums break imitators of S3": [
        "storage/test_s3.py::test_abilities_are_found_by_trying_and_nothing_is_left",
        "storage/test_s3.py::test_a_server_that_ignores_conditions_is_not_trusted_with_them",
        "storage/test_s3.py::test_a_server_that_knows_no_conditions_copies_or_uploads_is_used_without",
        "storage/test_s3.py::test_a_fault_of_a_moment_is_not_taken_for_a_lack_of_ability",
        "replicate/test_lease.py::test_without_conditional_writes_one_still_wins",
    ],
    "the S3 door of Google's store: no batch delete, odd listings": [
        "storage/test_s3.py::test_a_server_without_batches_deletes_one_by_one",
        "storage/test_s3.py::test_a_listing_that_cannot_go_on_is_an_error",
    ],
    "unordered listings drop whole prefixes": [
        "storage/test_s3.py::test_a_first_page_out_of_order_is_sorted",
        "storage/test_s3.py::test_a_later_page_out_of_order_is_an_error_and_then_sorted",
    ],
    "odd keys are skipped in silence": [
        "replicate/test_replicate.py::test_odd_keys_are_copied_or_named_never_skipped",
        "replicate/test_pains.py::test_a_key_that_no_folder_can_hold_fails_by_name",
    ],
    "memory grows with the number of keys": [
        "replicate/test_scale.py::test_a_plan_costs_the_same_memory_whatever_the_number_of_objects",
        "replicate/test_scale.py::test_nothing_to_do_asks_for_the_same_whatever_the_size",
    ],
    "an object changes while it is read": [
        "replicate/test_replicate.py::test_an_object_that_changes_while_it_is_read_starts_again",
        "replicate/test_replicate.py::test_a_source_that_never_rests_is_an_error",
    ],
    "two cron runs copy everything twice": [
        "replicate/test_lease.py::test_of_many_contenders_one_wins",
        "ops/test_schedule.py::test_an_overlapping_run_is_answered_busy_without_noise",
        "ops/test_schedule.py::test_debians_cron_fires_at_a_minute_and_an_overlapping_run_is_busy",
    ],
    "half files and temporary files after a kill": [
        "replicate/test_resume.py::test_sigkill_at_a_random_instant_and_again",
        "storage/test_local.py::test_a_killed_writer_leaves_nothing_visible_and_the_next_writer_sweeps",
    ],
    "a large object starts from zero after a kill": [
        "replicate/test_resume.py::test_finished_parts_of_a_large_object_are_not_sent_again",
        "replicate/test_resume.py::test_an_upload_without_a_record_is_adopted_by_its_tags",
    ],
    "orphaned uploads cost money for ever": [
        "replicate/test_resume.py::test_an_upload_that_is_no_longer_wanted_is_aborted_and_a_strangers_is_left",
        "replicate/test_resume.py::test_an_upload_that_nobody_recorded_and_nobody_needs_is_aborted",
        "replicate/test_resume.py::test_what_a_killed_probe_left_is_swept_when_it_is_old",
    ],
    "truncated bodies, stalls, resets, expired credentials": [
        "faults/test_replicate_faults.py::test_each_fault_alone",
        "faults/test_replicate_faults.py::test_all_faults_mixed",
        "storage/test_s3.py::test_a_renewed_secret_is_read_again",
    ],
    "a total timeout kills long transfers": [
        "faults/test_s3_faults.py::test_a_stream_goes_on_after_a_break_with_the_same_version",
        "storage/test_http1.py::test_a_silent_server_is_a_timeout",
    ],
    "storms of 503": [
        "replicate/test_limits.py::test_a_request_to_slow_down_halves_it_and_a_burst_of_them_counts_once",
        "faults/test_replicate_faults.py::test_a_server_that_throttles_is_given_time",
    ],
    "clock skew ends the run": [
        "faults/test_replicate_faults.py::test_a_server_whose_clock_is_wrong",
        "replicate/test_lease.py::test_a_wrong_clock_takes_nothing_from_a_holder",
    ],
    "loops of links, names that differ by case": [
        "replicate/test_replicate.py::test_a_loop_of_links_is_an_error",
        "replicate/test_replicate.py::test_names_that_differ_by_case_are_refused_where_the_disk_folds_them",
        "replicate/test_replicate.py::test_files_that_cannot_be_beside_each_other_are_refused_before_copying",
    ],
    "the index is visible before what it names": [
        "replicate/test_replicate.py::test_the_index_is_published_after_everything_that_it_names",
        "replicate/test_replicate.py::test_an_index_changed_by_somebody_else_meanwhile_is_left_alone",
    ],
    "Ctrl-C leaves things running": [
        "replicate/test_resume.py::test_a_signal_stops_cleanly_and_says_how_to_go_on",
    ],
}


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_each_complaint_has_its_tests(complaint):
    assert COMPLAINTS[complaint]
    for place in COMPLAINTS[complaint]:
        file, _, function = place.partition("::")
        assert re.search(rf"^def {function}\(", (TESTS / file).read_text(), re.MULTILINE), place


def test_an_object_sent_in_parts_is_verified_and_passed_on_by_its_own_digest(
    s3_a, s3_b, tmp_path, monkeypatch
):
    monkeypatch.setattr(transfer, "LARGE_BYTES", 1 << 20)
    source, b, c = LocalStore(tmp_path / "big"), Spy(s3_a.store("big")), s3_b.store("big")
    (name,) = make_dataset(source, count=1, size=(20 << 20) + 3)
    replicate(source, {"b": b}, name="big", options=QUICK)
    assert b.count("complete", name) == 1
    assert verify(b, name="big", quiet=True).good
    (outcome,) = replicate(b, {"c": c}, name="big", options=QUICK)
    assert outcome.error is None
    assert data_of(c) == data_of(source)
    (outcome,) = replicate(source, {"b": b}, name="big", options=QUICK)
    assert outcome.tally.copied == 0


def test_a_key_that_no_folder_can_hold_fails_by_name(s3_a, tmp_path):
    source, there = s3_a.store("odd"), LocalStore(tmp_path / "odd")
    source.write("fine", b"1")

    class Odd(Spy):
        """A server that keeps doubled slashes, as S3 does; SeaweedFS folds them."""

        def list(self, prefix="", *, after=""):
            from dataclasses import replace

            for info in super().list(prefix, after=after):
                yield info
                yield replace(info, key="fine//twice")

    (outcome,) = replicate(Odd(source), {"b": there}, name="odd", options=QUICK)
    assert outcome.error is not None
    assert "fine//twice" in str(outcome.error)
