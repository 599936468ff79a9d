"""`flashpoint verify --url` shows the verification report of a server."""

import flashpoint
from tests.support.verify_answers import REPORT, says


def test_a_verification_of_a_server_is_shown(run, scripted, tmp_path):
    scripted.script.extend([says(REPORT), says(REPORT | {"ok": False})])
    code, out, _ = run(
        "verify", "--q-len", "8", "--head-dim", "4", "--causal", "--window", "3,0", "--url", scripted.url,
        "--plot", tmp_path / "errors.png",
    )  # fmt: skip
    assert code == 0
    assert "✓ o" in out
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")
    sent = flashpoint.VerifyRequest.model_validate_json(scripted.requests[0][3])
    assert (sent.causal, sent.window, sent.shape.q_len) == (True, (3, 0), 8)
    assert run("verify", "--q-len", "8", "--head-dim", "4", "--url", scripted.url)[0] == 1
