"""The server's page requests verifications, shows their reports, and cancels them."""

import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from playwright.sync_api import expect

from tests.support.browser import cells, drawn, fill, run_shown_code, said
from tests.support.messages import JSON, message, normal, post

TENSORS = ["o", "lse", "dq", "dk", "dv"]


def test_a_verification_is_judged_and_the_code_on_screen_asks_the_same(page):
    form, outcome = page.locator("#verify form"), page.locator("#verify .outcome")
    assert not outcome.is_visible()  # no empty panel is shown
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
    charts = drawn(page, "#verify .decades .plot")
    for chart, tensor in zip(charts, report["tensors"], strict=True):
        counts = [decade["count"] for decade in tensor["histogram"]]
        assert [count for count in chart["lines"]["elements"] if count is not None] == counts
        assert chart["lost"] == []
    # The request has the values of the form, without those that are defaults of the API.
    assert json.loads(re.search(r"-d '(.*)'", page.locator("#verify-code code").inner_text() or "{}")[1]) == {
        "shape": {"q_heads": 4, "kv_heads": 2, "q_len": 33, "kv_len": 40, "head_dim": 16},
        "backend": "tiled", "causal": True, "window": [8, -1], "softcap": 20, "seed": 3, "extras": ["sinks"],
    }  # fmt: skip
    assert run_shown_code(page, "verify", "Python").startswith("right ")
    note = outcome.locator(".note")
    expect(note).to_be_hidden()
    fill(form, seed=4)
    expect(note).to_be_visible()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate(
        "window.setTimeout = () => 0"
    )  # the page would remove the word "Copied" after two seconds, which may be too soon on a slow machine
    page.locator("#verify-code").get_by_role("button", name="Copy").click()
    expect(page.locator("#verify-code").get_by_role("button")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#verify-code code").inner_text()


@pytest.mark.slow
def test_a_wrong_element_is_shown_where_it_is(page, server):
    """The page shows the position of a wrong element. It gets the server's real report about a wrong o."""
    q, k, v = (normal(1, 2, 48, 16, seed=seed) for seed in range(3))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    o[0, 1, 17, 5] += 1e-2
    report = post(server, "/verify", message({"q": q, "k": k, "v": v, "o": o}), accept=JSON)
    assert not report.json["ok"]
    event = b'event: report\ndata: {"kind":"report","report":%s}\n\n' % report.body
    page.route("**/verify", lambda route: route.fulfill(body=event, content_type="text/event-stream"))
    page.locator("#verify form").get_by_role("button", name="Verify").click()
    expect(said(page, "verify")).to_contain_text("Wrong: beyond its bound: o · given on")
    ((name, verdict, error, *_, at, there, truth),) = cells(page, "verify")
    assert (name, verdict, error, at) == ("o", "wrong", "0.01", "[0, 1, 17, 5]")
    there, truth = (float(text.replace("−", "-")) for text in (there, truth))
    assert there - truth == pytest.approx(1e-2, rel=1e-3)


def test_a_bound_is_in_its_chart_and_never_left_of_zero(page):
    """The red line of the bound is always to the right of the bar of exact elements, even if the bound is 0 or tiny."""
    script = """async () => {
        const { decades } = await import("/static/decades.js");
        const { charts } = await import("/static/chart.js");
        const element = document.querySelector("#main").appendChild(document.createElement("div"));
        const histogram = [{ exponent: null, count: 9 }, { exponent: -7, count: 40 }];
        decades(element, [2e-11, 0, 1e-6].map((bound) => ({ name: "o", bound, histogram })));
        await new Promise((resolve) => setTimeout(resolve));
        return [...element.querySelectorAll(".plot")].map((part) => {
            const { plot } = charts.get(part);
            const { left, top, width } = plot.bbox;
            const { data } = plot.ctx.getImageData(left, top + 1, width, 1);
            const isRed = (at) => data[at] > 150 && data[at + 2] < 90 && data[at + 3] > 128;
            const red = [...Array(Math.floor(width)).keys()].filter((x) => isRed(4 * x));
            const name = plot.ctx.getImageData(left, top + 4, width, 12).data; // the bound's name, beside the line
            const isName = (at) => Math.abs((at % width) + left - (left + red[0])) > 4 && name[4 * at + 3] > 128
                && name[4 * at] > 150 && name[4 * at + 2] < 90;
            const written = [...Array(12 * Math.floor(width)).keys()].filter(isName).map((at) => at % width);
            const labels = plot.axes.map(({ label }) => label);
            return [red.length, left + red[0], plot.valToPos(0.3, "x", true), left + width, labels,
                    written.length, Math.min(...written) > 0 && Math.max(...written) < width - 1];
        });
    }"""
    places = page.evaluate(script)
    assert len(places) == 3
    for count, place, end_of_zero, end, labels, written, whole in places:
        assert count > 0
        assert end_of_zero < place < end
        assert labels == ["absolute error", "elements"]
        assert written > 40
        assert whole  # the name does not end outside the chart
    assert places[1][1] < places[0][1] < places[2][1]


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
    form.locator("summary").click()
    fill(form, seed=10**19)
    verify.click()
    expect(alert).to_contain_text("seed")  # the page shows the server's message
    expect(form.locator("[name=seed]")).to_have_attribute("aria-invalid", "true")
    assert queries.get_attribute("aria-invalid") is None


@pytest.mark.slow
def test_a_verification_is_cancelled_while_it_waits(open_page, gated):
    """If a verification that waits behind a blocked launch is cancelled, the server drops it; no result is shown."""
    page = open_page(gated.server)
    expect(page.locator("#playground .outcome")).to_be_visible()  # the page's first call has ended
    name = f"cancelled-{uuid.uuid4().hex}"
    page.route("**/verify", lambda route: route.continue_(headers={**route.request.headers, "x-request-id": name}))
    form, outcome = page.locator("#verify form"), page.locator("#verify .outcome")
    blocker = message({n: normal(2, 4, seed=seed) for seed, n in enumerate("qkv")}, backend="reference")
    with ThreadPoolExecutor(1) as pool, gated.busy(pool, blocker):
        form.get_by_role("button", name="Verify").click()
        gated.wait_queued(name)
        expect(outcome.locator(".waiting progress")).to_be_visible()
        expect(form.get_by_role("button", name="Verify")).to_be_disabled()
        form.get_by_role("button", name="Cancel").click()
        expect(said(page, "verify")).to_contain_text("Cancelled.")
        line = gated.server.wait_for_request(name)
        assert (line["status"], line["code"]) == (499, "client_gone")
        gated.wait_dropped(name)
    expect(outcome.locator(".waiting")).to_be_hidden()
    expect(outcome.locator(".result")).to_be_hidden()
    expect(form.get_by_role("button", name="Verify")).to_be_enabled()


@pytest.mark.slow
def test_a_verification_shows_its_blocks_and_is_cancelled_while_it_runs(open_page, gated):
    """While the engine waits in the third block, the page shows the progress; after a cancel, no more blocks start."""
    page = open_page(gated.server)
    expect(page.locator("#playground .outcome")).to_be_visible()
    name = f"step-{uuid.uuid4().hex}"
    page.route("**/verify", lambda route: route.continue_(headers={**route.request.headers, "x-request-id": name}))
    form, outcome = page.locator("#verify form"), page.locator("#verify .outcome")
    gated.gate("step").unlink(missing_ok=True)
    try:
        form.get_by_role("button", name="Verify").click()
        waiting = outcome.locator(".waiting")
        expect(waiting).to_contain_text("Block 3 of 10: float64, o and lse")
        bar = waiting.locator("progress")
        assert (bar.get_attribute("value"), bar.get_attribute("max")) == ("2", "10")
        form.get_by_role("button", name="Cancel").click()
        expect(said(page, "verify")).to_contain_text("Cancelled.")
        gated.wait_stopped(name)
    finally:
        gated.gate("step").touch()
    page.unroute("**/verify")
    form.get_by_role("button", name="Verify").click()
    expect(said(page, "verify")).to_contain_text("Right: every tensor is within its bound")
    assert gated.blocks(name) == [0, 1, 2]
    line = gated.server.wait_for_request(name)
    assert (line["status"], line["code"]) == (200, "client_gone")
