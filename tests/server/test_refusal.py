"""A refusal has a whole problem document, whose texts are of bounded length."""

from flashpoint_server.refusal import LONGEST_MESSAGE, LONGEST_NAME, STATUS, Refusal, invalid


def test_an_error_repeats_names_and_values_in_part():
    long, spaced = "x" * 70_000, "x " * 35_000
    for text in (long, spaced):
        refusal = invalid([(text, f"{text!r} is not known")])
        ((field, message),) = refusal.errors
        assert len(field) <= LONGEST_NAME
        assert len(message) <= LONGEST_MESSAGE
        assert message.endswith("is not known")
        assert len(Refusal("not_found", f"there is no /{text}").detail) <= LONGEST_MESSAGE
    short = f"there is no {'x' * 150} and no {'y' * 150}"
    assert Refusal("not_found", short).detail == short


def test_a_problem_document_is_complete_for_every_code():
    for code, status in STATUS.items():
        document = Refusal(code, "because").document("an-id")
        assert (document["status"], document["code"], document["request_id"]) == (status, code, "an-id")
        assert document["title"]
        assert ("Retry-After" in Refusal(code, "because").headers) == (status in (429, 503))
