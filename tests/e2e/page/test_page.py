"""The server's page in headless Chromium: metrics, device, caches, API keys, accessibility, other sites' requests."""

import http.server
import json
import re
import threading

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

import flashpoint
from tests.support.browser import PATIENCE_MS, drawn, enter, fill, never_known, run_shown_code, said, start_benchmark
from tests.support.messages import ask, message, normal, post


@pytest.fixture
def evil():
    """Yield the URL of a page on another site, with a link. Tests send requests to our server from this page."""

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
        yield f"http://localhost:{site.server_port}"  # a browser treats localhost and 127.0.0.1 as different sites
        site.shutdown()
        thread.join()


def fence(server):
    """Make a request and wait for its log line: the log then has the lines of all earlier requests, too."""
    server.wait_for_request(ask(server, "/info").headers["x-request-id"])


def refused_since(server, first):
    """Return (method, route) of each request that was refused as cross-site, from log line `first` on."""
    lines = [line for line in server.lines[first:] if line.get("code") == "cross_site"]
    return [(line["method"], line["route"]) for line in lines]


def test_a_page_of_another_site_computes_nothing_and_may_link_here(chromium, server, evil):
    infer = "/v2/models/attention/infer"
    fence(server)
    first = len(server.lines)
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(evil)
    send = """async ([path, how]) => {
        const answer = await fetch(path, how).catch(() => ({ type: "error" }));
        return answer.type;
    }"""
    body = json.dumps({"inputs": [{"name": n, "shape": [1, 1], "datatype": "FP32", "data": [1]} for n in "qkv"]})
    sent = {"method": "POST", "mode": "no-cors", "headers": {"Content-Type": "text/plain"}, "body": body}
    assert page.evaluate(send, [server.url + infer, sent]) == "opaque"  # sent, but the page cannot read the answer
    assert page.evaluate(send, [f"{server.url}/benchmark", {**sent, "body": "{}"}]) == "opaque"
    assert (
        page.evaluate(
            send, [server.url + infer, {**sent, "mode": "cors", "headers": {"Content-Type": "application/json"}}]
        )
        == "error"
    )
    page.evaluate("url => document.querySelector('a').href = url", server.url)
    page.get_by_text("prize").click()
    # A link from another site works: the requests that the page then sends are same-site.
    expect(page.locator("#health")).to_have_text("Ready")
    context.close()
    fence(server)
    assert refused_since(server, first) == [("POST", infer), ("POST", "/benchmark"), ("OPTIONS", infer)]
    assert not [line for line in server.lines[first:] if line.get("route") == infer and "backend" in line]


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

    never_known(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    benchmark = page.locator("#benchmark form")
    for name, value in {"max_seconds": "400", "lengths": "1024, 1025", "backends": "naive"}.items():
        field = benchmark.locator(f"[name={name}]")
        tab_to(field)
        assert focus_is_visible()
        page.keyboard.press("Control+A")
        page.keyboard.type(value)
    tab_to(benchmark.get_by_role("button", name="Start"))
    assert focus_is_visible()
    page.keyboard.press("Enter")
    cancel = benchmark.get_by_role("button", name="Cancel")
    expect(said(page, "benchmark")).to_contain_text("naive")  # the timing has started
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
    expect(page.locator("#fill .detail")).to_contain_text("requests per launch: 1")
    charts = drawn(page, "#traffic .plot")
    assert [[*chart["lines"]] for chart in charts] == [["requests"], ["p50", "p99"], ["fill"], ["waiting"]]
    for chart in charts:
        assert chart["lost"] == []
        assert -120 <= chart["x"][0] <= chart["x"][-1] <= 0
    assert max(filter(None, charts[0]["lines"]["requests"])) > 0


def test_quantiles_are_those_between_two_samples(page):
    """The page computes quantiles of the 100 requests between two samples of /metrics, without 100 earlier ones.

    30 of these requests take up to 1 ms, 60 take 1 to 2 ms, and 10 exceed the histogram's last bound.
    """

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
    facts = page.locator("#device .facts").first
    expect(facts).to_contain_text(info["device"]["title"])
    expect(facts).to_contain_text(", ".join(info["backends"]))
    limits = page.locator("#device .limits")
    names, values = (limits.locator(tag).all_inner_texts() for tag in ("dt", "dd"))
    assert len(names) == len(info["limits"])
    shown = dict(zip(names, values, strict=True))
    assert {name: shown[name] for name in ("Body of a request", "Work of a launch", "Longest deadline")} == {
        "Body of a request": "1 GiB", "Work of a launch": "4.4 TFLOP", "Longest deadline": "60 min",
    }  # fmt: skip
    assert shown["Default deadline of a request"] == "none"


def test_features_are_grouped_and_each_backend_has_those_of_info(page, server):
    _, info = server.get("/info")
    table = page.locator("#device table")
    expect(table.locator("thead th")).to_have_text(["Features", *info["backends"]])
    able = {backend: set() for backend in info["backends"]}
    count = 0
    for row in table.locator("tbody tr").all():
        every = row.locator("small").inner_text().split(", ")
        count += len(every)
        for backend, cell in zip(info["backends"], row.locator("td").all_inner_texts(), strict=True):
            kind, _, named = cell.partition(" ")
            some = set(named.removeprefix("except ").split(", ")) if named else set()
            assert some <= set(every)
            able[backend] |= {"all": set(every) - some, "only": some, "none": set()}[kind]
    assert {backend: len(features) for backend, features in able.items()} == {
        backend: len(features) for backend, features in info["options"].items()
    }
    assert count == len({feature for features in info["options"].values() for feature in features})
    assert "head dim over 256" in able["tiled"] & able["cpu"]
    assert "head dim over 576" in able["reference"] - able["cpu"]


def test_a_feature_that_the_page_does_not_know_is_shown(open_page, server):
    _, info = server.get("/info")
    info["options"]["cpu"].append("mind_reading")

    def open_with_more(route):
        route.fulfill(json=info)

    page = open_page(server, prepare=lambda page: page.route("**/info", open_with_more))
    row = page.locator("#device tbody tr").last
    expect(row.locator("th")).to_contain_text("Other")
    expect(row.locator("th")).to_contain_text("mind reading")
    expect(row.locator("td").first).to_have_text("all")
    expect(row.locator("td").last).to_have_text("none")


def test_caches_are_listed_and_deleted(page, server):
    for one in server.get("/saved")[1]["saved"]:  # delete those of other tests, which the page would also show
        ask(server, f"/saved/{one['id']}", "DELETE")
    with flashpoint.Client(server.url) as client:
        for cache in client.list_caches():
            cache.delete()
        small, large = (client.cache(layers=2, kv_heads=2, head_dim=8, keep=keep) for keep in (None, 64))
        k = normal(1, 2, 1500, 8)
        large.append(k, k, layer=1)
        small.append(k[:, :, :5], k[:, :, :5])
        rows = page.locator("#caches tbody tr")
        expect(rows.first).to_contain_text(f"{large.id[:9]}…0–1,500")  # the page may show deleted caches for a while
        expect(rows).to_have_count(2)
        first = rows.first.locator("th, td").all_inner_texts()
        assert first[:6] == [f"{large.id[:9]}…", "0–1,500", "2", "2", "8", "float32"]
        assert re.fullmatch(r"[\d.]+ min", first[7])
        expect(page.locator("#caches .said")).to_have_text(
            re.compile(r"^Yours: 2\. On the server: 2 and 0 saved forwards, with [\d.]+ KiB of 4 GiB\.$")
        )
        delete = page.get_by_role("button", name=f"Delete the cache {large.id[:9]}…")
        delete.click()
        question = page.get_by_role("dialog")
        expect(question).to_contain_text(f"Delete the cache {large.id[:9]}…? Its 0–1,500 tokens (")
        page.keyboard.press("Enter")  # the focus is on the button Keep
        expect(question).to_be_hidden()
        expect(delete).to_be_focused()
        large.refresh()
        delete.click()
        question.get_by_role("button", name="Delete").click()
        expect(rows).to_have_count(1)
        with pytest.raises(flashpoint.CacheError):
            large.refresh()
        small.delete()
        expect(rows).to_have_count(0)
        expect(page.locator("#caches .said")).to_contain_text("Yours: 0. On the server: 0")
    assert run_shown_code(page, "caches", "Python") == "(1, 8, 1, 64) 3\n"
    assert json.loads(run_shown_code(page, "caches", "curl")) == {"caches": []}


SCREENS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]


def violations(page):
    """Return (rule, impact, elements) of each accessibility rule that the page violates, by axe; contrast included."""
    violations = Axe().run(page).response["violations"]
    return [(v["id"], v["impact"], [n["target"] for n in v["nodes"]]) for v in violations]


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_it_fits_and_is_accessible(open_page, server, scheme, width):
    with flashpoint.Client(server.url) as client, client.cache(kv_heads=2, head_dim=8) as cache:
        page = open_page(server, color_scheme=scheme, viewport={"width": width, "height": 800})
        page.locator("#verify summary").click()
        page.locator("#verify form").get_by_role("button", name="Verify").click()
        start_benchmark(page, lengths="32")
        expect(said(page, "verify")).to_contain_text("Right")
        expect(said(page, "benchmark")).to_contain_text("Done")
        expect(page.locator("#playground .outcome")).not_to_have_attribute("aria-busy", "true")
        for charts in (drawn(page, ".charts > div"), drawn(page, ".decades .plot"), drawn(page, "[data-part=lse]")):
            assert charts
            assert all(chart["lost"] == [] for chart in charts)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 3 * 64) == (scheme == "dark")
        delete = page.get_by_role("button", name=f"Delete the cache {cache.id[:9]}…")
        expect(delete).to_be_visible()
        fill(page.locator("#verify form"), shape__q_len=77)  # now the form differs from the request of the result
        assert violations(page) == []
        delete.click()
        assert violations(page) == []
        page.get_by_role("button", name="Keep").click()
        # On a phone, each row is shown as a card with column names, and nothing scrolls sideways.
        label = "cell => getComputedStyle(cell, '::before').content"
        cell = page.locator("#verify tbody tr").first.locator("td").nth(1)
        assert cell.evaluate(label) == ('"Max error"' if width == 390 else "none")
        if width == 390:
            wide = "tables => tables.filter(table => table.parentElement.scrollWidth > table.parentElement.clientWidth)"
            tables = page.locator("main table.cards")
            assert tables.count() == 4
            assert tables.evaluate_all(f"tables => ({wide})(tables).length") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), SCREENS)
def test_its_other_pages_fit_and_are_accessible(open_page, server, scheme, width):
    """The errors page and the tutorial fit the screen and pass axe. /docs itself is Swagger UI, of another project."""
    for path in ("/docs/errors", "/docs/tutorial"):
        page = open_page(server, path, color_scheme=scheme, viewport={"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert violations(page) == []


def test_it_says_what_it_is_and_leads_to_the_tutorial(open_page, server, start_server):
    page = open_page(server)
    about = page.get_by_role("region", name="About")
    expect(about).to_contain_text("send Q, K and V, and get exact attention, or its gradients")
    expect(about.get_by_role("link")).to_have_text(["Tutorial", "API", "Errors"])
    about.get_by_role("link", name="Tutorial").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("First call")
    assert page.locator("main a").evaluate_all("links => links.filter(link => link.href.includes('.md')).length") == 0
    text = page.locator("article").inner_text()
    assert "localhost:8000" not in text
    assert f"curl -s {server.url}/health/ready" in text
    assert f'flashpoint.Client("{server.url}")' in text
    expect(page.get_by_role("link", name=server.url, exact=True)).to_have_attribute("href", server.url)
    documented = start_server(docs_url="https://docs.example/flashpoint/")
    html = ask(documented, "/").body.decode()
    assert '<a href="https://docs.example/flashpoint/">Documentation</a>' in html
    assert 'href="https://docs.example/flashpoint/install.html#' in ask(documented, "/docs/tutorial").body.decode()


def test_its_links_below_the_introduction_begin_where_the_text_does(open_page, server):
    about = open_page(server, viewport={"width": 390, "height": 800}).get_by_role("region", name="About")
    left = about.locator("p").bounding_box()["x"]
    rows = {}
    for box in (link.bounding_box() for link in about.get_by_role("link").all()):
        rows.setdefault(box["y"], []).append(box["x"])
    assert min(rows[max(rows)]) == pytest.approx(left, abs=1)


@pytest.mark.slow
def test_with_keys_it_asks_for_one_and_holds_it_back(open_page, start_server):
    server = start_server(ready=False, api_keys="secret-1,secret-2:info")
    page = open_page(server)
    door = page.locator("#key")
    expect(door.get_by_label("Key")).to_be_focused()
    assert not page.locator("main").is_visible()
    expect(page.locator("#health")).to_have_text("Key needed")
    enter(page, "wrong")
    expect(door.get_by_role("alert")).to_have_text("This key is not valid.")
    enter(page, "secret-2")
    needed = {"playground": "attention", "traffic": "metrics", "verify": "verify", "benchmark": "benchmark"}
    for part, right in needed.items():
        expect(page.locator(f"#{part} .denied")).to_contain_text(f"This key lacks the permission “{right}”")
        for form in page.locator(f"#{part} form").all():
            assert form.evaluate("form => form.inert")
    expect(page.locator("#health")).to_have_text("Ready")
    expect(page.locator("#playground .outcome")).to_be_hidden()
    expect(page.locator("#traffic .tiles")).to_be_hidden()
    code = page.locator("#verify-code code")
    expect(code).to_contain_text('-H "Authorization: Bearer $FLASHPOINT_API_KEY"')
    page.locator("#verify-code").get_by_label("Python").check()
    expect(code).to_contain_text('api_key=os.environ["FLASHPOINT_API_KEY"]')
    assert "secret-2" not in page.content()
    page.reload()  # the browser tab keeps the key
    expect(page.locator("main")).to_be_visible()
    page.get_by_role("button", name="Forget the key").click()
    expect(door).to_be_visible()
    expect(page.locator("#health")).to_have_text("Key needed")
    enter(page, "secret-1")  # this key has all permissions
    expect(page.locator("#traffic .tiles")).to_be_visible()
    expect(page.locator(".denied")).to_have_count(0)
    assert not page.locator("#verify form").evaluate("form => form.inert")


@pytest.mark.slow
def test_the_documentation_is_drawn_from_this_server_alone(open_page, server):
    page = open_page(server, "/docs")
    page.locator("#docs").get_by_text("/attention", exact=True).first.click()
    expect(page.get_by_role("button", name="Try it out")).to_be_visible()
    policy = ask(server, "/docs").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ")
    assert ask(server, "/redoc").status == 404
