"""Each setting is a flag of `flashpoint serve`."""

import re

from flashpoint.cli import main
from flashpoint_server.config.settings import Settings


def test_every_setting_is_a_flag_with_a_help_text(capsys):
    assert main(["serve", "--help"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description[1:].split(";")[0].split(",")[0] in text
