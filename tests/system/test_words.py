from onefold.system.words import cause_of, message_of, words_of_failure


class Silent(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


def test_a_message_can_always_be_shown() -> None:
    assert message_of(ValueError("one\ntwo")) == "one\ntwo"
    assert message_of(Silent()) == "its message cannot be shown, as its own str() raised KeyError"
    assert message_of(ValueError("\udcff")) == "\\udcff"
    assert len(message_of(ValueError("x" * 10**6))) == 4000


def test_the_cause_below_the_words_of_libraries_is_named() -> None:
    refused = RuntimeError("HTTPSConnectionPool(host='hub', port=443): Max retries exceeded")
    refused.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert cause_of(refused) == "[Errno 111] Connection refused"
    assert cause_of(ValueError("one\ntwo")) == "one"


def test_the_end_of_a_device_is_told_as_what_it_was() -> None:
    assert words_of_failure(KeyError("a"), 2) == "failed in step 2: KeyError: 'a'"
    assert words_of_failure(Silent(), 2).startswith("failed in step 2: Silent: its message cannot")
    assert words_of_failure(SystemExit(0), 2).startswith("ended by sys.exit(0) in step 2, which")
