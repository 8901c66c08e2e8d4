"""Each sentence of docs/reference/security.md has a test that proves it, or promises nothing.

A new sentence fails here until its tests are named below, by its first words.
"""

import ast
import re
from collections.abc import Iterator

from tests.conftest import ROOT

NOTHING = ()
"""A sentence that asks something of the reader, or that says what is not protected."""

CRAFTED = "jobs/test_crafted.py::test_two_hundred_crafted_runs_do_no_harm"
SECOND = "test_second_user.py::test_another_user_gets_nothing_and_holds_nothing_up"
HAZARDS = "test_hazards.py::test_every_hazard_was_looked_at"
SEALED = "exchange/test_connections.py::test_a_value_of_a_stranger_is_refused"
PROOF = "exchange/test_connections.py::test_the_secret_is_not_sent_and_what_was_heard_is_of_no_use"
ONE_VIEW = "exchange/test_connections.py::test_both_see_one_connection"
BETWEEN = "exchange/test_connections.py::test_who_stands_in_between_keeps_devices_from_joining"
LISTENS = "exchange/test_apart.py::test_nothing_listens_where_other_hosts_could_reach_it"
APART = "exchange/test_apart.py::test_a_run_trains_and_says_that_it_has_no_secret"
REFUSED = "exchange/test_apart.py::test_who_lacks_the_secret_is_refused"
OF_OTHERS = "cli/test_strangers.py::test_a_record_of_another_user_is_shown_and_not_run"
BUNDLE = "cli/test_strangers.py::test_a_bundle_runs_only_if_the_user_agrees"
DAMAGE = (
    "checkpoint/test_damage.py::test_a_damaged_checkpoint_is_refused_by_name_and_the_older_used"
)
FOLDERS = "system/test_caches.py::test_folders_others_may_change"
OWN_FOLDER = "system/test_caches.py::test_a_folder_is_made_for_this_user_alone"
INFINITE = "jobs/data/test_pictures.py::test_links_lead_neither_to_devices_nor_round_without_end"
PICKLES = "test_weights.py::test_no_code_is_run"
SAFE_PATH = "test_hazards.py::test_every_python_that_is_started_has_a_safe_path"
IMPORTS = "launcher/test_worker.py::test_the_current_folder_is_no_place_of_libraries"
# The beginnings of long names.
ENDED = "launcher/test_supervise.py::test_how_a_worker_ended_is_known"
READER = "record/test_frames.py::test_a_reader_neither"
WHOLE = "system/test_safe_files.py::test_a_file_is_written_whole"

PROVEN_BY: dict[str, tuple[str, ...]] = {
    "What other users of a host": NOTHING,
    "For each sentence on": ("test_security_page.py::test_each_sentence_has_a_test",),
    # Who is trusted with what
    "| | may | may not": NOTHING,
    "| your own account": NOTHING,
    "| other users of the host": (SECOND,),
    "| other hosts of the run": (HAZARDS, SEALED),
    "| any process on the network": (REFUSED, LISTENS),
    "| files (data, run folders": (CRAFTED, PICKLES, INFINITE),
    "| records of others and": (OF_OTHERS, BUNDLE),
    "| your script, its": NOTHING,
    # Processes of one host
    "**Shared memory and files.**": (
        "launcher/test_supervise.py::test_a_worker_gets_a_folder_and_memory_of_its_owner_alone",
        "launcher/test_worker.py::test_a_call_leaves_no_file",
    ),
    "No port is open.": (LISTENS,),
    "**`--exchange collective`.** Each device listens": (LISTENS,),
    "Devices connect there while": (REFUSED, PROOF),
    "If a stranger breaks": (
        "exchange/test_group.py::test_connections_that_break_while_they_are_made_are_made_anew",
        SECOND,
    ),
    "A stranger who tries": NOTHING,
    "**Sockets.** Devices on one host": (SECOND,),
    "Both ends check": (
        "exchange/test_mailbox.py::test_a_stranger_of_another_user_is_shown_out",
        "exchange/test_mailbox.py::test_a_stranger_is_shown_out",
    ),
    "**Imports.** onefold starts": (
        SAFE_PATH,
        "cli/test_strangers.py::test_modules_where_a_run_was_started_are_not_imported",
        IMPORTS,
    ),
    "onefold puts the script's": (IMPORTS,),
    "If you type `python -m": NOTHING,
    "**Children of a script.**": (
        "launcher/test_worker.py::test_the_record_of_a_worker_is_taken_out_of_the_environment",
    ),
    "So a program that the": (
        "launcher/test_worker.py::test_a_forked_child_of_a_device_is_not_the_device",
    ),
    "Under `onefold run` and `onefold.launch` such": (
        "launcher/test_supervise.py::test_children_of_a_worker_that_has_ended_are_ended",
    ),
    "**Compiled code.** PyTorch loads": (
        "system/test_caches.py::test_the_default_of_pytorch_is_known",
    ),
    "With `compile=True`": (
        OWN_FOLDER,
        SECOND,
        "system/test_caches.py::test_the_compiler_keeps_nothing_elsewhere",
    ),
    "Every folder on the way": (
        FOLDERS,
        "system/test_caches.py::test_a_folder_or_a_link_of_another_user",
    ),
    "A folder that you name": (FOLDERS,),
    "If you do not name": (
        "system/test_caches.py::test_caches_elsewhere_stay_where_they_are_if_that_is_safe",
    ),
    "Code that a script compiles": NOTHING,
    "**Signals.** onefold signals": (f"{ENDED}_and_no_number_is_used_that_may_be_anothers",),
    "**Containers.** If a container": (
        "session/test_refused_calls.py::test_workers_without_pidfds",
        "session/test_refused_calls.py::test_memory_without_memfds",
    ),
    "**Locks.** onefold does not wait": (
        f"{READER}_keeps_a_record_from_being_written_nor_frees_it",
    ),
    "Only their owner can": (
        "checkpoint/test_folder.py::test_a_lock_is_its_owners_alone_and_no_forked_child_keeps_it",
        "jobs/test_runfolder.py::test_a_strange_lock_is_refused",
    ),
    "A lock is kept if": (
        "jobs/test_runfolder.py::test_a_lock_outlives_a_look_at_its_file",
        "record/test_frames.py::test_a_forked_child_does_not_keep_the_lock",
    ),
    # Several hosts
    "Over several hosts, PyTorch": NOTHING,
    "**They are not encrypted": NOTHING,
    "Use a network that only": NOTHING,
    "The secret does two things": (SEALED, PROOF),
    "Everything that devices leave": (
        SEALED,
        "exchange/test_connections.py::test_processes_with_the_secret_understand_each_other",
    ),
    "A value without it": (
        SEALED,
        "exchange/test_connections.py::test_a_process_without_the_secret_says_so",
    ),
    "Each process proves": (
        PROOF,
        "exchange/test_connections.py::test_those_who_know_the_secret_belong_together",
    ),
    "The proof covers": (ONE_VIEW, BETWEEN),
    "A process that cannot": ("exchange/test_connections.py::test_who_does_not_know_it_is_named",),
    "If addresses are translated": (ONE_VIEW, BETWEEN),
    "Without a secret the lead": (APART,),
    "The secret does not cover": NOTHING,
    "A process that reaches the store's": NOTHING,
    "Traffic after the proof": NOTHING,
    "On GPUs NCCL makes": NOTHING,
    "`torchrun` opens ports": NOTHING,
    "| what listens": NOTHING,
    "| each device, over `--exchange": (LISTENS,),
    "| each device, over several": (
        "exchange/test_group.py::test_gloo_stays_on_one_host_while_the_group_is_made",
        "exchange/test_group.py::test_hosts_whose_own_names_are_loopback_addresses_connect",
    ),
    "| each device on one host": (
        LISTENS,
        "exchange/test_mailbox.py::test_a_stranger_is_shown_out",
    ),
    "Nothing that arrives over": (HAZARDS,),
    # Files
    "**Run folders** of others": (CRAFTED,),
    "None writes outside": (CRAFTED,),
    "A defect in one": (CRAFTED,),
    "**Checkpoints** hold tensors": (
        "checkpoint/test_folder.py::test_what_was_saved_loads_into_a_fresh_model",
    ),
    "`trainer.load`, `onefold predict`": (
        DAMAGE,
        "jobs/test_predict.py::test_damaged_weights_are_refused_by_name",
        "checkpoint/test_crafted.py::test_weights_of_a_damaged_checkpoint_are_refused",
    ),
    "That detects damage": NOTHING,
    "Only regular files inside": (
        DAMAGE,
        "checkpoint/test_crafted.py::test_a_record_of_the_wrong_form_is_refused_in_words",
    ),
    "**Object storage** (`--checkpoint": (
        "checkpoint/test_remote.py::test_a_damaged_one_is_left_out",
        "checkpoint/test_remote.py::test_forged_sizes_are_not_downloaded",
        "checkpoint/test_remote.py::test_a_url_has_a_private_copy",
    ),
    "A user with write access to the bucket": NOTHING,
    "The credentials are read by": (
        "checkpoint/test_remote.py::test_credentials_stay_with_their_package",
    ),
    "Keep secrets out of": NOTHING,
    "**Records.** `onefold.Record`": (CRAFTED,),
    "`onefold replay`, `why` and": (OF_OTHERS,),
    "If the record belongs": (OF_OTHERS,),
    "Environment variables are": (
        "cli/test_strangers.py::test_variables_that_run_code_are_never_taken_from_a_record",
    ),
    "A record is bound": (
        "record/test_chain.py::test_a_thousand_edits_are_refused_by_name",
        "record/test_chain.py::test_a_run_does_not_resume_with_another_record",
    ),
    "**Bundles** hold code": (BUNDLE,),
    "`onefold replay FILE`": (BUNDLE,),
    "**Weights** in PyTorch's": (PICKLES,),
    "A file that needs code": (PICKLES,),
    "**Models and tokenizers**": (
        "jobs/test_text_models.py::test_code_of_a_description_is_never_trusted",
        "jobs/test_text_models.py::test_only_weights_that_are_no_code_are_read",
    ),
    "**Images** are opened": (
        "jobs/data/test_pictures.py::test_no_picture_starts_a_program",
        "jobs/data/test_pictures.py::test_too_many_pixels_are_not_decoded",
    ),
    "Compressed files, lines": (
        "jobs/data/test_arrays.py::test_no_more_is_unpacked_than_the_header_promises",
        "jobs/data/test_tables.py::test_labels_and_lines_without_end_are_bad",
        INFINITE,
    ),
    "**CSV** that": ("jobs/test_predict.py::test_no_cell_is_a_formula",),
    "**Reports** show": ("jobs/report/test_report.py::test_everything_a_run_says_is_escaped",),
    "**Commands**, messages and": (
        "system/test_words.py::test_what_a_terminal_obeys_is_written_out",
        "cli/test_hostile_text.py::test_every_command_is_looked_at",
        "cli/test_hostile_text.py::test_messages_of_the_log",
    ),
    "**Output.** onefold writes": (
        f"{WHOLE}_and_on_the_disk_before_it_takes_its_place",
        CRAFTED,
    ),
    "It refuses to replace": (
        "jobs/data/test_files.py::test_what_is_not_ours_is_not_written_over",
        "jobs/report/test_report.py::test_a_page_is_not_written_over_files_of_others",
        "launcher/test_supervise.py::test_what_is_not_ours_is_refused",
    ),
    "**`onefold.launch`** sends": ("launcher/test_worker.py::test_a_call_leaves_no_file",),
    # What is left to you
    "An account that others": NOTHING,
    "Denial of service by": NOTHING,
    "Scripts, data sets that are": NOTHING,
}
"""The tests of each sentence, item or row, by its first words."""


def sentences() -> Iterator[str]:
    """The sentences of the page; an item of a list is several, a row of a table is one."""
    text = (ROOT / "docs" / "reference" / "security.md").read_text()
    for block in re.split(r"\n\s*\n|\n(?=- |\|)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        words = " ".join(block.split()).removeprefix("- ")
        if words.startswith("|"):
            yield from [] if words.startswith("|---") else [words]
        elif words and not words.startswith("#"):
            yield from re.split(r"(?<=[.:])\s+(?=[A-Z*`])|(?<=\.)\s+(?=onefold )", words)


def test_each_sentence_has_a_test() -> None:
    found = {
        each: [begins for begins in PROVEN_BY if each.startswith(begins)] for each in sentences()
    }
    assert {each: begins for each, begins in found.items() if len(begins) != 1} == {}
    used = [begins for (begins,) in found.values()]
    assert [begins for begins in PROVEN_BY if used.count(begins) != 1] == []


def test_each_test_that_is_named_is_there() -> None:
    missing = []
    for each in sorted({each for tests in PROVEN_BY.values() for each in tests}):
        name, _, test = each.partition("::")
        path = ROOT / "tests" / name
        tree = ast.parse(path.read_text() if path.exists() else "")
        if test not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(each)
    assert missing == []
