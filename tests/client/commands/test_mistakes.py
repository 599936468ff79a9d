"""About a hundred mistakes in command lines are refused with the right exit code, a message and a hint.

A row of ROWS has the arguments, the environment variables, the exit code, and a text that stderr must contain.
"""

import os
import socket

import numpy as np
import pytest

import flashpoint

pytest.importorskip("torch", reason="install the extra: pip install '.[torch]'")

SIZES = ("--q-len", "8", "--head-dim", "4")
RATES = ("--tflops", "1", "--network-gbit", "1")
DEAD = "http://127.0.0.1:{free}"  # no server listens there
COMMANDS = [
    ("", "usage: flashpoint COMMAND"),
    ("sevre", "no command 'sevre'\n  hint: did you mean serve?"),
    ("server", "hint: did you mean serve?"),
    ("verfy", "hint: did you mean verify?"),
    ("bench", "hint: did you mean benchmark?"),
    ("capcity", "hint: did you mean capacity?"),
    ("infos", "hint: did you mean info?"),
    ("helth", "hint: did you mean health?"),
    ("conf", "hint: did you mean config?"),
    ("frobnicate", "no command 'frobnicate'\n  hint: flashpoint --help lists the commands"),
    ("--verison", "flashpoint: --verison: unknown option\n  hint: did you mean --version?"),
    ("serve extra", "flashpoint serve: unexpected argument: extra\n  hint: flashpoint serve --help"),
    ("info extra", "flashpoint info: unexpected argument: extra"),
]
OPTIONS = [
    ("serve --prot 9000", "--prot: unknown option\n  hint: did you mean --port?"),
    ("serve --hots 0.0.0.0", "hint: did you mean --host?"),
    ("serve --worker 2", "hint: did you mean --workers?"),
    ("serve --log-fromat json", "hint: did you mean --log-format?"),
    ("serve --queue_limit 3", "hint: did you mean --queue-limit?"),
    ("serve --api-key-file f", "hint: did you mean --api-keys-file?"),
    ("serve --unheard-of", "--unheard-of: unknown option\n  hint: flashpoint serve --help lists the options"),
    ("serve --port", "--port: needs a value\n  hint: flashpoint serve --help"),
    ("health --prot 1", "flashpoint health: --prot: unknown option\n  hint: did you mean --port?"),
    (
        "health --url http://x",
        "--url: is no option of this command, which works on this machine alone\n  hint: flashpoint info",
    ),
    ("reproduce --url http://x", "hint: flashpoint info --url URL asks a server at another address"),
    ("config --chnged", "hint: did you mean --changed?"),
    ("verify --q-length 8 --head-dim 4", "hint: did you mean --q-len?"),
    ("verify --qlen 8", "hint: did you mean --q-len?"),
    ("verify --headdim 8", "hint: did you mean --head-dim?"),
    ("verify {sizes} --casual", "hint: did you mean --causal?"),
    ("verify {sizes} --is-causal", "--is-causal: unknown option\n  hint: did you mean --causal?"),
    ("verify {sizes} --is_causal", "hint: did you mean --causal?"),
    ("verify {sizes} --softmax-scale 1", "hint: did you mean --scale?"),
    ("verify {sizes} --sm-scale 1", "hint: did you mean --scale?"),
    ("verify {sizes} --dropout 0.1", "hint: did you mean --dropout-p?"),
    ("verify {sizes} --window-size 3,0", "hint: did you mean --window?"),
    ("verify {sizes} --soft-cap 3", "hint: did you mean --softcap?"),
    ("verify {sizes} --dtpye float16", "hint: did you mean --dtype?"),
    ("verify {sizes} --ulr http://x", "hint: did you mean --url?"),
    ("verify {sizes} --jsno -", "hint: did you mean --json?"),
    ("benchmark --preset", "--preset: needs a value"),
    ("benchmark --backends tiled", "hint: did you mean --backend?"),
    ("benchmark --presets seeds", "hint: did you mean --preset?"),
    ("capacity {sizes} --tflop 1", "hint: did you mean --tflops?"),
    ("capacity {sizes} --network-gbits 1", "hint: did you mean --network-gbit?"),
    ("info --timeot 3", "hint: did you mean --timeout?"),
    ("key", "NAME: is missing"),
    ("key alice --right info", "hint: did you mean --rights?"),
    ("key alice --request-per-second 3", "hint: did you mean --requests-per-second?"),
]
VALUES = [
    ("serve --port abc", "--port: must be an integer, not 'abc'\n  hint: port to listen on"),
    ("serve --port 70000", "--port: must be less than or equal to 65535, not '70000'"),
    ("serve --port=-1", "--port: must be greater than or equal to 0, not '-1'"),
    ("serve --workers 0", "--workers: must be greater than or equal to 1, not '0'"),
    ("serve --workers two", "--workers: must be an integer, not 'two'"),
    ("serve --device gpu", "--device: 'gpu' is not valid\n  hint: auto, cpu, cuda, cuda:N or all"),
    ("serve --device tpu", "--device: 'tpu' is not valid"),
    ("serve --log-format xml", "--log-format: must be 'auto', 'json' or 'console', not 'xml'"),
    ("serve --log-level verbose", "--log-level: must be 'debug', 'info', 'warning' or 'error', not 'verbose'"),
    ("serve --body-timeout soon", "--body-timeout: must be a number, not 'soon'"),
    ("serve --body-limit 1GB", "--body-limit: must be bytes, such as 4294967296 or 4GiB, not '1GB'"),
    ("serve --api-keys a:root", "--api-keys: key 1 must be KEY or KEY:right+right"),
    ("serve --cache-secret short", "--cache-secret: needs 32 or more random characters"),
    ("serve --cors-origins example.org", "--cors-origins: must be origins such as https://example.org, or *, not"),
    ("serve --allowed-hosts http://x:1", "--allowed-hosts: 'http://x:1' is not allowed"),
    ("serve --otlp-endpoint localhost:4318", "--otlp-endpoint: 'localhost:4318' is not valid"),
    ("serve --tls-cert none.pem", "--tls-cert: none.pem cannot be read: No such file"),
    ("serve --tls-key none.pem", "--tls-cert: is missing; --tls-key and --tls-client-ca need it"),
    ("serve --api-keys-file none.toml", "--api-keys-file: "),
    ("serve --shared-memory-bytes 1 --workers 2", "--shared-memory-bytes: needs one worker"),
    (
        "serve --host 192.0.2.1",
        "--host: other machines can reach 192.0.2.1, and the server has no API keys\n  hint: set",
    ),
    ("serve --config none.toml", "--config: none.toml cannot be read: no such file or directory"),
    ("serve --env-file none.env", "--env-file: none.env cannot be read: no such file or directory"),
    ("serve --config bad.toml", "--config: bad.toml is not TOML"),
    ("serve --config prot.toml", "prot in prot.toml: unknown setting; did you mean port?"),
    ("serve --config port.toml", "port in port.toml: must be an integer, not 'abc'"),
    ("serve --env-file bad.env", "FLASHPOINT_PORT in bad.env: must be an integer, not 'abc'"),
    ("health --port 0", "--port: must be the port of the server, not 0\n  hint: the log of the server names it"),
    ("verify --q-len eight --head-dim 4", "--q-len: must be an integer"),
    ("verify --q-len 8", "--q-len, --head-dim: give both for a problem, or give a FILE"),
    ("verify {sizes} --dtype float23", "--dtype: 'float23' is not one of float16"),
    ("verify {sizes} --dtype flaot32", "hint: did you mean float32?"),
    (
        "verify {sizes} --layout bhds",
        "--layout: 'bhds' is not one of bhsd, bshd, thd, sbhd, shd, hsd, bsd, sd\n  hint: did you mean sbhd?",
    ),
    ("verify {sizes} --layout shd", "--layout: shd is for --kernel; others are bhsd, bshd, thd"),
    ("verify --kernel math:sqrt --layout thd", "--layout: thd is not for --kernel"),
    ("verify {sizes} --backend cuda", "--backend: 'cuda' is not one of auto, triton, cpu, torch, tiled, reference"),
    ("verify {sizes} --backend trition", "hint: did you mean triton?"),
    ("verify {sizes} --window 3", "--window: item 2 is missing"),
    ("verify {sizes} --window a,b", "--window: must be integers, with a comma between two, not 'a,b'"),
    ("verify {sizes} --dropout-p 1.5", "--dropout-p: must be less than 1"),
    ("verify {sizes} --grads dz", "--grads: must be 'dq'"),
    ("verify {sizes} --extras masks", "--extras: must be 'bool_mask'"),
    ("verify {sizes} --timeout 0", "--timeout: must be at least 0.001"),
    ("verify {sizes} --q-heads 3 --kv-heads 2", "q_heads"),
    ("verify {sizes} --plot errors.gif", "--plot: the file must end with .svg or .png"),
    ("verify {sizes} --plot none/errors.svg", "--plot: none/errors.svg cannot be written: there is no folder none"),
    ("verify {sizes} --json none/r.json", "--json: none/r.json cannot be written: there is no folder none"),
    ("verify none.safetensors", "FILE: file 'none.safetensors' does not exist"),
    ("verify text.txt", "file: text.txt is no safetensors file"),
    (
        "verify torch.safetensors",
        "needs tensors q, k and v. It has query (did you mean q?), key (did you mean k?), value (did",
    ),
    ("verify flash.safetensors", "softmax_scale: unknown option or tensor; did you mean scale?"),
    ("verify named.safetensors", "out: unknown tensor; did you mean o?"),
    ("verify --kernel mine", "--kernel: must be MODULE:FUNCTION, not 'mine'"),
    (
        "verify --kernel no.such:f",
        "--kernel: there is no module no: run it in the folder of the module",
    ),
    (
        "verify --kernel ./text.py:f",
        "--kernel: must be MODULE:FUNCTION, not the file ./text.py\n  hint: write --kernel text:f\n",
    ),
    ("verify --kernel text.py", "not the file text.py\n  hint: write --kernel text:FUNCTION\n"),
    ("verify --kernel /kernels/text:f", "hint: write --kernel text:f, and run it in /kernels\n"),
    (
        "verify text.py",
        "FILE: text.py is Python, and no safetensors file\n  hint: write --kernel text:FUNCTION for a function of it\n",
    ),
    ("benchmark {sizes} --kernel ./text.py:f", "not the file ./text.py\n  hint: write --kernel text:f\n"),
    ("verify --kernel math:sqrt --require fast", "verify: --require: 'fast' is not one of accurate, deterministic"),
    ("verify --kernel math:sqrt --require all,accuratee", "hint: did you mean accurate?"),
    ("verify --kernel math:sqart", "--kernel: math has no sqart; did you mean sqrt?"),
    ("verify --kernel math:pi", "--kernel: math:pi must be a function, not float"),
    ("verify --kernel math:sqrt --url http://x", "--kernel: is not taken with --url"),
    ("benchmark --head-dim 64", "--q-len, --head-dim: give both for a grid, or give a --preset"),
    ("benchmark --preset papres", "--preset: 'papres' is not one of papers, h100, seeds\n  hint: did you mean papers?"),
    ("benchmark --preset seeds --q-len 3", "--preset: has its own shapes: leave out the sizes"),
    ("benchmark --q-len 0 --head-dim 64", "flashpoint benchmark: a shape without queries or keys leaves nothing"),
    ("benchmark {sizes} --causal maybe", "--causal: 'maybe' is not one of no, yes, both"),
    ("benchmark {sizes} --dtype int8", "--dtype: 'int8' is not one of float16"),
    ("benchmark {sizes} --dtype half,flaot32", "hint: did you mean float32?"),
    ("capacity {sizes} --dtype torch.int8", "--dtype: 'torch.int8' is not one of float16"),
    ("loadtest --callers 0", "--callers: must be 1 to 1024, not 0"),
    ("benchmark {sizes} --backend cudnn", "--backend: 'cudnn' is not one of"),
    ("benchmark {sizes} --direction sideways", "--direction: must be 'forward'"),
    ("benchmark {sizes} --backend kernel", "flashpoint benchmark --kernel MODULE:FUNCTION times it"),
    ("benchmark {sizes} --kernel mine", "--kernel: must be MODULE:FUNCTION, not 'mine'"),
    ("benchmark {sizes} --kernel math:sqrt --url http://x", "--kernel: is not taken with --url"),
    ("benchmark --q-len 8;16 --head-dim 4", "--q-len: must be integers, with a comma between two, not '8;16'"),
    ("capacity {sizes}", "--tflops, --network-gbit: give both, or a --url, which measures them"),
    ("capacity --head-dim 4", "--q-len: is missing"),
    ("capacity {sizes} {rates} --tflops 0", "--tflops: must be above 0, not 0"),
    ("capacity {sizes} {rates} --layers 3", "--layers: is taken with --cached only"),
    ("capacity {sizes} --url http://x --tflops 1", "--tflops: is not taken with --url, which measures it"),
    ("key a/b", "NAME: the name of a key must be letters, digits, - and _, at most 64, not 'a/b'"),
    ("key alice --rights attention,info", "\n  hint: put + between two: attention+info"),
    ("key alice --rights atention", "hint: did you mean attention?"),
    ("key alice --concurrent 0", "--concurrent: must be above 0, not 0"),
    ("info --url localhost:8000", "info: --url: must begin with http:// or https://"),
    ("info --url http://", "url: must begin with http:// or https://"),
]
VARIABLES = [
    ("serve", {"FLASHPOINT_PORT": "abc"}, "serve: FLASHPOINT_PORT: must be an integer, not 'abc'"),
    ("serve", {"FLASHPOINT_INSECURE": "perhaps"}, "FLASHPOINT_INSECURE: must be true or false, not 'perhaps'"),
    ("health", {"FLASHPOINT_WORKERS": "0"}, "FLASHPOINT_WORKERS: must be greater than or equal to 1, not '0'"),
    (
        "config",
        {"FLASHPOINT_CONFIG": "none.toml"},
        "FLASHPOINT_CONFIG: none.toml cannot be read: no such file or directory",
    ),
    ("serve", {"FLASHPOINT_CACHE_SECRET": "short"}, "FLASHPOINT_CACHE_SECRET: needs 32 or more random characters"),
]
UNREACHABLE = [
    ("info --url {dead} --timeout 60", "the connection to {dead} failed: [Errno 111] Connection refused"),
    ("verify {sizes} --url {dead} --timeout 60", "hint: is the server running? `flashpoint serve` starts one here"),
    ("benchmark {sizes} --url {dead} --timeout 60", "flashpoint benchmark: the connection to {dead} failed"),
    ("loadtest --url {dead} --timeout 60", "flashpoint loadtest: the connection to {dead} failed"),
    ("capacity {sizes} --url {dead} --timeout 60", "flashpoint capacity: the connection to {dead} failed"),
]
ROWS = [
    *((arguments, {}, 2, said) for arguments, said in (*COMMANDS, *OPTIONS, *VALUES)),
    *((arguments, variables, 2, said) for arguments, variables, said in VARIABLES),
    *((arguments, {}, 3, said) for arguments, said in UNREACHABLE),
    ("health --port {free}", {}, 1, "no answer on port {free}: [Errno 111] Connection refused\n  hint: is the server"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of invalid files, each with a different fault."""
    folder_path = tmp_path_factory.mktemp("mistakes")
    (folder_path / "bad.toml").write_text("port is 3")
    (folder_path / "prot.toml").write_text("prot = 3")
    (folder_path / "port.toml").write_text('port = "abc"')
    (folder_path / "bad.env").write_text("FLASHPOINT_PORT=abc")
    (folder_path / "text.txt").write_text("Flash attention as an endpoint, and no tensors.")
    (folder_path / "text.py").write_text("def f(q, k, v): ...")
    x = np.zeros((2, 4), np.float32)
    case = flashpoint.save_case(folder_path / "case", q=x, k=x, v=x, o=x, scale=1.0).read_bytes()
    renamed = case.replace(b'"scale":', b'"softmax_scale":')  # now the head is longer than the length field says
    (folder_path / "flash.safetensors").write_bytes(_headed(renamed, len(renamed) - len(case)))
    longer = case.replace(b'"o":', b'"out":')
    (folder_path / "named.safetensors").write_bytes(_headed(longer, 2))
    theirs = case.replace(b'"q":', b'"query":').replace(b'"k":', b'"key":').replace(b'"v":', b'"value":')
    theirs = theirs.replace(b'"o":', b'"out":')
    (folder_path / "torch.safetensors").write_bytes(_headed(theirs, len(theirs) - len(case)))
    return folder_path


def _headed(case, more):
    size = int.from_bytes(case[:8], "little") + more
    return size.to_bytes(8, "little") + case[8:]


@pytest.fixture(scope="module")
def free():
    """Yield a port on which no server listens, reserved until the tests of this module end."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(("arguments", "variables", "code", "message"), ROWS, ids=[row[0] or "none" for row in ROWS])
def test_a_mistake_is_refused_with_what_to_do(run, folder, free, monkeypatch, arguments, variables, code, message):
    monkeypatch.chdir(folder)
    for name in [name for name in os.environ if name.startswith("FLASHPOINT_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    dead = DEAD.format(free=free)
    words = {"sizes": " ".join(SIZES), "rates": " ".join(RATES), "dead": dead, "free": free}
    status, out, err = run(*arguments.format(**words).split())
    assert (status, out) == (code, ""), err
    assert message.format(**words) in err
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[0].startswith(("flashpoint", "usage: flashpoint"))
    assert not lines[0].endswith(".")
