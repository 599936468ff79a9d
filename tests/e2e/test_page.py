"""The page in a real browser, Chromium without a window, at a real server."""

import http.server
import json
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

import flashpoint
from flashpoint_server.page.errors import ERRORS
from flashpoint_server.refusal import STATUS
from tests.support.messages import JSON, ask, message, normal, post

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_MS = 240_000  # for anything; only there to end a hang
TENSORS = ["o", "lse", "dq", "dk", "dv"]


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip(
            "needs Chromium: install Debian's package chromium-headless-shell (apt-get install chromium-headless-shell)"
        )
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, timeout=PATIENCE_MS)
        yield browser
        browser.close()
    expect.set_options(timeout=5000)  # its default


@pytest.fixture
def open_page(chromium):
    """A factory of pages at a server; each must ask that server alone, and no script of it may fail."""
    opened = []

    def open_at(server, path="/", **how):
        context = chromium.new_context(reduced_motion="reduce", **{"viewport": {"width": 1280, "height": 900}, **how})
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        complaints, asked = [], []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if "Security Policy" in line.text else None)
        page.on("request", lambda request: asked.append(request.url))
        opened.append((context, server.url, complaints, asked))
        page.goto(f"{server.url}{path}")
        return page

    yield open_at
    for context, url, complaints, asked in opened:
        context.close()
        assert complaints == []
        assert [one for one in asked if not one.startswith((f"{url}/", "blob:"))] == []


@pytest.fixture
def page(open_page, server):
    page = open_page(server)
    expect(page.locator("#health")).to_have_text("Ready")
    return page


@pytest.fixture
def evil():
    """The address of a page of another site, which sends to the server what needs no leave, and links to its page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>Evil</title><a>prize</a>")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"http://localhost:{site.server_port}"  # to a browser, not the site of 127.0.0.1
        site.shutdown()
        thread.join()


def test_a_page_of_another_site_computes_nothing_and_may_link_here(chromium, server, evil):
    said = len(server.lines)
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(evil)
    send = """async ([path, how]) => {
        const answer = await fetch(path, how).catch(() => ({ type: "error" }));
        return answer.type;
    }"""
    infer = f"{server.url}/v2/models/attention/infer"
    body = json.dumps({"inputs": [{"name": n, "shape": [1, 1], "datatype": "FP32", "data": [1]} for n in "qkv"]})
    sent = {"method": "POST", "mode": "no-cors", "headers": {"Content-Type": "text/plain"}, "body": body}
    assert page.evaluate(send, [infer, sent]) == "opaque"  # sent, and its answer is hidden from the page
    assert page.evaluate(send, [f"{server.url}/benchmark", {**sent, "body": "{}"}]) == "opaque"
    assert (
        page.evaluate(send, [infer, {**sent, "mode": "cors", "headers": {"Content-Type": "application/json"}}])
        == "error"
    )
    page.evaluate("url => document.querySelector('a').href = url", server.url)
    page.get_by_text("prize").click()
    expect(page.locator("#health")).to_have_text("Ready")  # its scripts and what they ask are this site's own
    lines = [line for line in server.lines[said:] if line["event"] == "request"]
    refused = [(line["method"], line["route"]) for line in lines if line.get("code") == "cross_site"]
    assert refused[:3] == [("POST", "/v2/models/attention/infer"), ("POST", "/benchmark"),
                           ("OPTIONS", "/v2/models/attention/infer")]  # fmt: skip
    assert len(refused) == 3
    assert not [line for line in lines if line["route"] == "/v2/models/attention/infer" and "backend" in line]
    context.close()


def fill(form, **values):
    for name, value in values.items():
        form.locator(f'[name="{name.replace("__", ".")}"]').fill(str(value))


def start_benchmark(page, lengths="32, 64", backends="naive, torch", seconds=0.02):
    form = page.locator("#benchmark form")
    fill(form, lengths=lengths, shape__q_heads=2, shape__head_dim=16, max_seconds=seconds, backends=backends)
    form.get_by_role("button", name="Start").click()


def said(page, section):
    return page.locator(f"#{section} .said")


def cells(page, section):
    return [row.locator("th, td").all_inner_texts() for row in page.locator(f"#{section} .result tbody tr").all()]


def run_shown_code(page, section, language):
    """The output of the code that the page shows."""
    page.locator(f"#{section}-code").get_by_label(language).check()
    code = page.locator(f"#{section}-code code").inner_text()
    command = [sys.executable, "-c", code] if language == "Python" else ["bash", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_benchmark_is_started_watched_to_its_end_and_drawn(page, server):
    start_benchmark(page)
    expect(said(page, "benchmark")).to_have_text("Done · 4 rows")
    job = ask(server, f"/benchmark/{page.url.partition('=')[2]}").json
    shown = cells(page, "benchmark")
    assert [row[0] for row in shown] == [row["backend"] for row in job["rows"]] == ["naive", "torch"] * 2
    assert [row[1] for row in shown] == [f"B1 H2 S{n} D16 float32 forward" for n in (32, 32, 64, 64)]
    assert [float(row[2]) for row in shown] == pytest.approx([row["ms"] for row in job["rows"]], rel=5e-3)
    image = page.locator("#benchmark figure img")
    for kind in ("Time", "TFLOP/s", "Speed-up", "Memory", "Roofline"):
        page.get_by_label(kind, exact=True).check()
        expect(image).to_have_attribute("alt", f"{kind} by backend, as in the table above")
        image.evaluate("image => image.decode()")  # fails where it is no picture
        assert image.evaluate("image => image.naturalWidth") > 300
    assert image.get_attribute("src").startswith("blob:")  # fetched, with the key where there is one
    page.reload()  # the address names the benchmark
    expect(said(page, "benchmark")).to_have_text("Done · 4 rows")
    assert cells(page, "benchmark") == shown


@pytest.mark.slow
def test_a_stream_that_breaks_goes_on_behind_its_last_event(page):
    sent = []

    def break_once(route):
        sent.append(route.request.headers.get("last-event-id"))
        if len(sent) > 1:
            route.continue_()
            return
        answer = route.fetch()  # of a benchmark that has ended: all of it
        route.fulfill(response=answer, body=answer.body()[: answer.body().index(b"event: row")])

    start_benchmark(page)
    expect(said(page, "benchmark")).to_have_text("Done · 4 rows")
    rows = cells(page, "benchmark")
    page.route("**/events", break_once)
    page.reload()
    expect(said(page, "benchmark")).to_have_text("Done · 4 rows")
    assert cells(page, "benchmark") == rows
    assert sent[0] is None
    assert int(sent[1]) >= 2


def test_a_verification_is_judged_and_the_code_on_screen_asks_the_same(page):
    form = page.locator("#verify form")
    fill(form, shape__batch=1, shape__q_heads=4, shape__q_len=33, shape__kv_len=40, shape__head_dim=16)
    form.locator("[name=backend]").select_option("tiled")
    form.locator("summary").click()
    fill(form, window="8, -1", softcap=20, seed=3)
    form.get_by_label("sinks").check()
    form.get_by_role("button", name="Verify").click()
    expect(said(page, "verify")).to_contain_text("Right: every tensor is within its bound · tiled on")
    shown = cells(page, "verify")
    assert [row[:2] for row in shown] == [[name, "right"] for name in TENSORS]

    report = json.loads(run_shown_code(page, "verify", "curl"))
    assert report["ok"]
    for row, tensor in zip(shown, report["tensors"], strict=True):
        figures = [float(text.replace("−", "-")) for text in row[2:6]]
        expected = [tensor["max_abs"], tensor["bound"], tensor["torch"]["max_abs"], tensor["rms"]]
        assert figures == pytest.approx(expected, rel=6e-3)
        assert json.loads(row[6]) == tensor["worst_index"]
    assert page.locator("#verify .decades figcaption").all_inner_texts() == TENSORS
    bars = [figure.locator("rect").count() for figure in page.locator("#verify .decades figure").all()]
    assert bars == [len(tensor["histogram"]) for tensor in report["tensors"]]
    # It was all asked for: what the form holds, and nothing that the API takes anyway.
    assert json.loads(re.search(r"-d '(.*)'", page.locator("#verify-code code").inner_text() or "{}")[1]) == {
        "shape": {"q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 40, "head_dim": 16},
        "backend": "tiled", "causal": True, "window": [8, -1], "softcap": 20, "seed": 3, "extras": ["sinks"],
    }  # fmt: skip
    assert run_shown_code(page, "verify", "Python").startswith("right ")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#verify-code").get_by_role("button", name="Copy").click()
    expect(page.locator("#verify-code").get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#verify-code code").inner_text()


@pytest.mark.slow
def test_a_wrong_element_is_shown_where_it_is(page, server):
    """The page takes only problems that the server solves itself: it is given the real report of another's answer."""
    q, k, v = (normal(1, 2, 48, 16, seed=seed) for seed in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    o[0, 1, 17, 5] += 1e-2
    report = post(server, "/verify", message({"q": q, "k": k, "v": v, "o": o}), accept=JSON)
    assert not report.json["ok"]
    page.route("**/verify", lambda route: route.fulfill(body=report.body, content_type=JSON))
    page.locator("#verify form").get_by_role("button", name="Verify").click()
    expect(said(page, "verify")).to_contain_text("Wrong: beyond its bound: o · given on")
    ((name, verdict, error, *_, at, there, truth),) = cells(page, "verify")
    assert (name, verdict, error, at) == ("o", "wrong", "0.01", "[0, 1, 17, 5]")
    there, truth = (float(text.replace("−", "-")) for text in (there, truth))
    assert there - truth == pytest.approx(1e-2, rel=1e-3)


def test_what_is_wrong_is_said_at_its_field(page):
    form = page.locator("#verify form")
    alert, verify = form.get_by_role("alert"), form.get_by_role("button", name="Verify")
    queries = form.get_by_label("Queries", exact=True)
    queries.fill("")
    verify.click()
    expect(alert).to_contain_text("Queries:")
    expect(queries).to_have_attribute("aria-invalid", "true")
    expect(queries).to_be_focused()
    fill(form, shape__q_len=8, shape__head_dim=16)
    form.locator("[name=backend]").select_option("torch")
    form.locator("summary").click()
    fill(form, softcap=2)
    verify.click()
    expect(alert).to_contain_text("softcap")  # the server's words
    expect(form.locator("[name=softcap]")).to_have_attribute("aria-invalid", "true")
    assert queries.get_attribute("aria-invalid") is None


@pytest.mark.slow
def test_by_keyboard_alone(page):
    def tab_to(locator, presses=60):
        for _ in range(presses):
            if locator.evaluate("element => element === document.activeElement"):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{locator} is not reached")

    def focus_is_visible():
        return page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'")

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    benchmark = page.locator("#benchmark form")
    for name, value in {"max_seconds": "600", "lengths": "64", "backends": "torch"}.items():
        field = benchmark.locator(f"[name={name}]")
        tab_to(field)
        assert focus_is_visible()
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    tab_to(benchmark.get_by_role("button", name="Start"))
    assert focus_is_visible()
    page.keyboard.press("Enter")
    cancel = benchmark.get_by_role("button", name="Cancel")
    expect(said(page, "benchmark")).to_contain_text("torch")  # it is being timed
    tab_to(cancel)
    page.keyboard.press("Space")
    expect(said(page, "benchmark")).to_contain_text("Cancelled")
    python = page.locator("#benchmark-code").get_by_label("curl")
    tab_to(python)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#benchmark-code code")).to_contain_text("client.benchmark(")


def test_traffic_is_shown_as_it_is(page, server):
    body = message({name: normal(4, 8, seed=seed) for seed, name in enumerate("qkv")})
    for tile in ("rate", "fill", "queue"):
        expect(page.locator(f"#{tile} .figure")).not_to_be_empty()
    for _ in range(5):
        assert post(server, "/attention", body).status == 200
    expect(page.locator("#latency .figure")).to_have_text(re.compile(r"^[\d.,]+ms$"))
    expect(page.locator("#latency .detail")).to_have_text(re.compile(r"^p99 [\d.,]+ ms$"))
    expect(page.locator("#rate .figure")).to_have_text(re.compile(r"^[\d.]*[1-9]"))
    expect(page.locator("#fill .detail")).to_contain_text("requests a launch: 1")
    expect(page.locator("#latency polyline")).to_have_attribute("points", re.compile(r"^\S+ \S+"))


def test_quantiles_are_those_between_two_samples(page):
    """100 requests before; then 30 within 1 ms, 60 from 1 to 2 ms, and 10 beyond the last bound."""

    def exposition(*counts):
        name = 'flashpoint_request_seconds_bucket{le="%s",route="%s"} %s'
        ours = zip(("0.001", "0.002", "+Inf"), ["/attention"] * 3, counts, strict=True)
        return "\n".join(name % line for line in (("0.001", "other", "9e9"), *ours))

    script = """async ([before, now]) => {
        const { parse, quantile } = await import("/static/metrics.js");
        return [0.3, 0.6, 0.99].map((q) => quantile(q, parse(before), parse(now), "flashpoint_request_seconds"));
    }"""
    before, now = exposition(50, 100, 100), exposition(80, 190, 200)
    assert page.evaluate(script, [before, now]) == pytest.approx([0.001, 0.0015, 0.002])
    assert page.evaluate(script, [now, now]) == [None, None, None]


def test_device_and_options_are_those_of_info(page, server):
    _, info = server.get("/info")
    facts = page.locator("#device .facts")
    expect(facts).to_contain_text(info["device"]["title"])
    expect(facts).to_contain_text(", ".join(info["backends"]))
    table = page.locator("#options table")
    head = table.locator("thead th").all_inner_texts()
    assert head == ["Option", *info["backends"]]
    for row in table.locator("tbody tr").all():
        option, *able = row.locator("th, td").all_inner_texts()
        expected = [option.replace(" ", "_") in info["options"][backend] for backend in info["backends"]]
        assert able == ["yes" if can else "no" for can in expected]


def test_caches_are_listed_and_deleted(page, server):
    with flashpoint.Client(server.url) as client:
        small, large = (client.cache(layers=2, kv_heads=2, head_dim=8, keep=keep) for keep in (None, 64))
        k = normal(1, 2, 1500, 8)
        large.append(k, k, layer=1)
        small.append(k[:, :, :5], k[:, :, :5])
        rows = page.locator("#caches tbody tr")
        expect(rows).to_have_count(2)
        first = rows.first.locator("th, td").all_inner_texts()
        assert first[:6] == [f"{large.id[:9]}…", "0–1,500", "2", "2", "8", "float32"]
        assert re.fullmatch(r"[\d.]+ min", first[7])
        expect(page.locator("#caches .said")).to_have_text(
            re.compile(r"^Yours: 2\. On the server: 2 and 0 saved forwards, with [\d.]+ KiB of 4 GiB\.$")
        )
        page.get_by_role("button", name=f"Delete the cache {large.id[:9]}…").click()
        expect(rows).to_have_count(1)
        with pytest.raises(flashpoint.CacheError):
            large.refresh()
        small.delete()
        expect(rows).to_have_count(0)
        expect(page.locator("#caches .said")).to_contain_text("Yours: 0. On the server: 0")
    assert run_shown_code(page, "caches", "Python") == "(1, 8, 1, 64) 3\n"
    assert json.loads(run_shown_code(page, "caches", "curl")) == {"caches": []}


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1280)])
def test_it_fits_and_is_accessible(open_page, server, scheme, width):
    page = open_page(server, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.locator("#verify summary").click()
    page.locator("#verify form").get_by_role("button", name="Verify").click()
    start_benchmark(page, lengths="32")
    expect(said(page, "verify")).to_contain_text("Right")
    expect(said(page, "benchmark")).to_contain_text("Done")
    expect(page.locator("#benchmark figure img")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 3 * 64) == (scheme == "dark")
    violations = Axe().run(page).response["violations"]
    assert [(v["id"], v["impact"], [n["target"] for n in v["nodes"]]) for v in violations] == []


def enter(page, key):
    """Type a key at the page's door."""
    page.locator("#key").get_by_label("Key").fill(key)
    page.locator("#key").get_by_role("button").click()


def test_with_keys_it_asks_for_one_and_holds_it_back(open_page, start_server):
    server = start_server(ready=False, api_keys="secret-1,secret-2:info")
    page = open_page(server)
    door = page.locator("#key")
    expect(door.get_by_label("Key")).to_be_focused()
    assert not page.locator("main").is_visible()
    enter(page, "wrong")
    expect(door.get_by_role("alert")).to_have_text("The key is not known.")
    enter(page, "secret-2")
    expect(page.locator("#traffic").get_by_role("alert")).to_contain_text("the key does not allow this")
    code = page.locator("#verify-code code")
    expect(code).to_contain_text('-H "Authorization: Bearer $FLASHPOINT_API_KEY"')
    page.locator("#verify-code").get_by_label("Python").check()
    expect(code).to_contain_text('api_key=os.environ["FLASHPOINT_API_KEY"]')
    assert "secret-2" not in page.content()
    page.reload()  # kept in the tab
    expect(page.locator("main")).to_be_visible()
    page.get_by_role("button", name="Forget the key").click()
    expect(door).to_be_visible()


@pytest.mark.slow
def test_with_a_key_a_benchmark_is_watched(open_page, start_server):
    page = open_page(start_server(api_keys="secret-1"))
    enter(page, "secret-1")
    expect(page.locator("#health")).to_have_text("Ready")
    start_benchmark(page, seconds=400)  # of each of four cases
    expect(said(page, "benchmark")).to_contain_text("of 4")  # its events come, which need the key
    page.get_by_role("button", name="Cancel").click()
    expect(said(page, "benchmark")).to_contain_text("Cancelled")


@pytest.mark.slow
def test_the_documentation_is_drawn_from_this_server_alone(open_page, server):
    page = open_page(server, "/docs")
    page.locator("#docs").get_by_text("/attention", exact=True).first.click()
    expect(page.get_by_role("button", name="Try it out")).to_be_visible()
    policy = ask(server, "/docs").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert ask(server, "/redoc").status == 404


def test_it_is_served_with_a_strict_policy_and_asked_for_again_in_vain(server):
    found = ask(server, "/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    text = found.body.decode()
    linked = re.findall(r'(?:href|src)="(static/[^"]+)"', text)
    assert len(linked) == 3
    for path in ("", *linked):
        answer = ask(server, f"/{path}")
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = ask(server, f"/{path}", if_none_match=answer.headers["etag"])
        assert (again.status, again.body) == (304, b"")
    assert not re.search(r"<style|<script(?![^>]+src=)| style=| on[a-z]+=|https?://", text)
    missing = ask(server, "/static/nothing.js")
    assert (missing.status, missing.json["code"]) == (404, "not_found")
    assert ask(server, "/static/..%2fpage.py").status == 404


def test_every_error_has_its_line_under_the_type_of_its_problem(server):
    refused = ask(server, "/nowhere").json
    page, _, anchor = refused["type"].partition("#")
    found = ask(server, page)
    assert (found.status, found.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "unsafe" not in found.headers["content-security-policy"]
    assert ERRORS.keys() == STATUS.keys()
    text = found.body.decode()
    assert f'<section id="{anchor}">' in text
    assert re.findall(r'<section id="([^"]+)">', text) == list(STATUS)
    assert not re.search(r"https?://", text)
