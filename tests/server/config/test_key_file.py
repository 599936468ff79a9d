"""The error about an invalid key file names the wrong field, and shows none of the file's values."""

import pytest
from pydantic import ValidationError

from flashpoint_server.config.key_file import read
from flashpoint_server.config.settings import Settings
from flashpoint_server.config.sources import SettingError, load


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("", "contains no keys"),
        ("[alice", "not TOML"),
        ("\xff", "not UTF-8"),
        ('[alice]\nrights = ["info"]', r"alice\.sha256"),
        ('[alice]\nsha256 = "s3cret"\nrights = ["info"]', r"alice\.sha256: must be the 64 hexadecimal digits"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["all"]', r"alice\.rights"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = []', r"alice\.rights"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nrequest_per_second = 1', "request_per_second"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nconcurrent = 0', "concurrent"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nbytes_per_second = inf', "bytes_per_second"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nconcurrent = true', "concurrent"),
        (f'[alice]\nsha256 = "{"0" * 64}"\nrights = ["info"]\nflops_per_second = "9"', "flops_per_second"),
        (f'["../alice"]\nsha256 = "{"0" * 64}"\nrights = ["info"]', "the name of a key"),
        ("alice = 1", "alice"),
    ],
)
def test_a_file_that_is_not_right_is_refused_and_no_value_is_shown(tmp_path, text, why):
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=why) as caught:
        read(path)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ValidationError, match="api_keys_file"):
        Settings(api_keys_file=path)
    with pytest.raises(SettingError, match=why) as started:
        load({"api_keys_file": str(path)}, environment={})
    assert "s3cret" not in str(started.value)
