import pytest

from flashpoint_contract import sse

STREAM = (
    ": the server is there\n\n"
    "id: 1\nevent: row\ndata: {\ndata:  é}\n\n"
    "data\n\n"  # a field without colon: an empty line of data
    "retry: 3\nid: 2\n\n"  # no data, so no event
    "data: x:y\r\n\r\ndata: z\r\rdata: cut off\n"
)
EVENTS = ["{\n é}", "", "x:y", "z"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    frames, stream = sse.Frames(), STREAM.encode()
    assert [d for i in range(0, len(stream), size) for d in frames.feed(stream[i : i + size])] == EVENTS


def test_an_event_without_end_is_refused():
    frames, line = sse.Frames(), b"data: " + b"x" * 65530 + b"\n"
    for _ in range(16):
        assert frames.feed(line) == []
    for reader, last in ((frames, line), (sse.Frames(), b"x" * (1 << 20) + b"y")):
        with pytest.raises(ValueError, match="over 1048576 bytes"):
            reader.feed(last)


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(ValueError, match="utf-8"):
        sse.Frames().feed(b"data: \xff\n")
