"""The server's page starts benchmarks, shows their progress, cancels them, and draws their results."""

import json
import re

import pytest
from playwright.sync_api import expect

from flashpoint_contract.schemas.benchmark import BenchmarkRow
from tests.support.browser import cells, drawn, enter, fill, never_known, said, start_benchmark
from tests.support.messages import ask
from tests.support.plot_rows import row

# This script returns the fraction of a chart's width that is dark at the height of `value`: large if there is a line.
LEVEL = """async (value) => {
    const { charts } = await import("/static/chart.js");
    const { plot } = charts.get(document.querySelector("#benchmark .charts > div"));
    const { left, width } = plot.bbox;
    const y = Math.round(plot.valToPos(value, "y", true));
    const { data } = plot.ctx.getImageData(left, y - 1, width, 2);
    const dark = (at) => data[4 * at + 3] > 128 && data[4 * at] < 80;
    return [...Array(width).keys()].filter((x) => dark(x) || dark(x + width)).length / width;
}"""


@pytest.mark.slow
def test_a_benchmark_is_started_watched_to_its_end_and_drawn(page, server):
    start_benchmark(page)
    expect(said(page, "benchmark")).to_have_text("Done · 4 rows")
    job = ask(server, f"/benchmark/{page.url.partition('=')[2]}").json
    shown = cells(page, "benchmark")
    assert [row[0] for row in shown] == [row["backend"] for row in job["rows"]] == ["naive", "cpu"] * 2
    assert [row[1] for row in shown] == [f"B1 H2 S{n} D16 float32 forward" for n in (32, 32, 64, 64)]
    assert [float(row[2].split()[0]) for row in shown] == pytest.approx([row["ms"] for row in job["rows"]], rel=5e-3)
    figures = {"Time": "ms", "TFLOP/s": "tflops_standard", "Speed-up": "speedup_over_naive", "Memory": "peak_bytes"}
    for kind, field in figures.items():
        page.get_by_label(kind, exact=True).check()
        (chart,) = drawn(page, "#benchmark .charts > div")
        assert chart["title"].endswith("forward · float32 · H 2 · D 16")
        assert (chart["x"], chart["lost"]) == ([32, 64], [])
        for backend in ("naive", "cpu"):
            of_rows = [row[field] for row in job["rows"] if row["backend"] == backend]
            assert chart["lines"][backend] == [figure or None for figure in of_rows]
    page.get_by_label("Speed-up", exact=True).check()
    assert page.evaluate(LEVEL, 1) > 0.5  # a dashed line at 1
    assert page.evaluate(LEVEL, 0.5) == 0
    page.get_by_label("Roofline", exact=True).check()
    (chart,) = drawn(page, "#benchmark .charts > div")
    assert (chart["title"], chart["lost"]) == ("Roofline: forward · float32", [])
    points = [value for name in ("naive", "cpu") for value in chart["lines"][name] if value is not None]
    assert sorted(points) == sorted(row["tflops"] for row in job["rows"] if not (row["roofline_percent"] or 0) > 100)
    assert max(chart["lines"]["measured roof"]) == job["environment"]["peaks"]["float32"]["tflops"]
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as SVG").click()
    assert saved.value.suggested_filename == "benchmark-roofline.svg"
    assert "<svg" in saved.value.path().read_text()
    page.reload()  # the page's address has the benchmark's id
    expect(said(page, "benchmark")).to_have_text("Done · 4 rows")
    assert cells(page, "benchmark") == shown
    expect(page.locator("#playground .outcome")).to_be_visible()  # the playground's answer moves the benchmark down
    expect(page.locator("#benchmark-title")).to_be_in_viewport()
    page.mouse.wheel(0, -100_000)
    expect(page.locator("#playground-title")).to_be_in_viewport()


def show_rows(page, rows, peaks=None):
    """Show a benchmark that has ended with these rows: the page follows the events of its address."""
    whole = [BenchmarkRow.model_validate(row).model_dump(mode="json") for row in rows]
    at = {"at": "2026-01-01T00:00:00Z"}
    events = [{"kind": "device", "environment": {"peaks": peaks or {}}}]
    events += [{"kind": "row", "done": n, "total": len(rows), "row": row} for n, row in enumerate(whole, 1)]
    events += [{"kind": "state", "state": "done", "error": None, **at}]
    frames = [f"id: {n}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n" for n, event in enumerate(events, 1)]
    page.route("**/events", lambda route: route.fulfill(body="".join(frames), content_type="text/event-stream"))
    page.evaluate(f"location.hash = '#benchmark=shown{len(rows)}'")
    expect(said(page, "benchmark")).to_contain_text("Done")


def test_a_figure_that_cannot_be_trusted_says_why_and_a_skipped_case_has_no_row(page):
    over = row("naive", 128, roofline_percent=407.0, busy=True)
    low = row("tiled", 128, roofline_percent=99.9, peak_bytes_low=True)
    skipped = [{**row("sdpa_flash", n), "skipped": "no kernel here"} for n in (128, 256)]
    show_rows(page, [over, low, *skipped])
    expect(said(page, "benchmark")).to_have_text("Done · 2 rows")
    first, second = cells(page, "benchmark")
    assert (first[0], first[2].split()[1], first[6]) == ("naive", "(busy)", "(over)")
    assert (second[0], second[6], second[7].split()[2]) == ("tiled", "99.9 %", "(low)")
    over_, busy, low_, left_out = page.locator("#benchmark .marks li").all_inner_texts()
    assert "its share of the roof means nothing: its data stayed in processor caches, or other programs ran" in over_
    assert busy.startswith("(busy): other programs used the cores")
    assert low_.startswith("(low): ")
    assert left_out.startswith("Not timed: sdpa_flash: no kernel here (B")
    assert "407" not in page.locator("#benchmark .result").inner_text()
    show_rows(page, [row("naive", 128)])
    expect(page.locator("#benchmark .marks")).to_be_hidden()


def test_the_roofline_has_no_point_above_the_roof(page):
    peaks = {"float32": {"tflops": 1.0, "gb_per_s": 100.0}}
    below = row("tiled", 128, roofline_percent=50.0, arithmetic_intensity=20.0, tflops=0.5)
    over = row("naive", 128, roofline_percent=300.0, arithmetic_intensity=5.0, tflops=1.5)
    show_rows(page, [below, over], peaks)
    page.get_by_label("Roofline", exact=True).check()
    (chart,) = drawn(page, "#benchmark .charts > div")
    assert set(chart["lines"]) == {"measured roof", "tiled"}
    assert [value for value in chart["lines"]["tiled"] if value is not None] == [0.5]
    expect(page.locator("#benchmark .marks li")).to_contain_text("The roofline has no point for it.")
    show_rows(page, [over], peaks)
    expect(page.locator("#benchmark .caption")).to_have_text("Roofline: no row has figures for it.")


def test_nothing_is_cut_off_at_1280_pixels(page):
    """The widest rows fit the table, code is wrapped, and each field shows its longest choice."""
    wide = {"batch": 16, "q_heads": 32, "kv_heads": 8, "q_len": 131_072, "kv_len": 131_072, "dtype": "bfloat16",
            "causal": True, "busy": True, "ms": 12345.6, "ms_p20": 11234.5, "ms_p80": 13456.7, "gb_per_s": 0.0123,
            "roofline_percent": 150.0, "peak_bytes_low": True, "peak_bytes": 1023 * 2**20}  # fmt: skip
    show_rows(page, [row("sdpa_flash", 128, "backward", **wide) | {"backend": "naive_explicit"}])
    settled = page.locator("#playground .outcome")
    expect(settled).to_be_visible()
    for part in page.locator(".scroll:visible, .code pre:visible").all():
        assert part.evaluate("part => part.scrollWidth - part.clientWidth") <= 0, part.inner_html()[:200]
    page.locator("#verify summary").click()
    cut = page.locator("select:visible").evaluate_all("""all => all.flatMap((one) => {
        const style = getComputedStyle(one);
        const context = document.createElement("canvas").getContext("2d");
        context.font = style.font;
        const room = one.clientWidth - parseFloat(style.paddingLeft) - 2; // beside the arrow
        return [...one.options].map(({ text }) => [one.name, text, context.measureText(text).width - room]);
    }).filter(([, , over]) => over > 0)""")
    assert cut == []


def test_lengths_show_their_format_and_may_have_a_k(page):
    form = page.locator("#benchmark form")
    expect(form.locator("label", has=page.locator("[name=lengths]"))).to_contain_text("with commas: 512, 1024, 16k")
    fill(form, lengths="1k, 512 16k")
    body = json.loads(re.search(r"-d '(.*)'", page.locator("#benchmark-code code").inner_text())[1])
    assert [shape["q_len"] for shape in body["shapes"]] == [1024, 512, 16_384]
    fill(form, lengths="1k, many")
    form.get_by_role("button", name="Start").click()
    expect(form.get_by_role("alert")).to_contain_text("Lengths:")


def test_a_length_that_is_too_large_is_refused_with_the_largest_that_fits(page):
    form = page.locator("#benchmark form")
    fill(form, lengths="512, 512k")
    form.get_by_role("button", name="Start").click()
    expect(form.get_by_role("alert")).to_contain_text("; lengths of up to ")
    expect(page.locator("#device .facts").first).to_contain_text("Longest sequence")


@pytest.mark.slow
def test_one_length_is_drawn_as_bars_and_a_changed_form_ages_it(page):
    outcome = page.locator("#benchmark .outcome")
    assert not outcome.is_visible()  # no empty panel is shown
    start_benchmark(page, lengths="32")
    expect(said(page, "benchmark")).to_have_text("Done · 2 rows")
    (chart,) = drawn(page, "#benchmark .charts > div")
    assert (chart["title"], chart["lost"]) == ("Time of a call: forward · float32 · H 2 · D 16 · S 32", [])
    assert [[value is None for value in line] for line in chart["lines"].values()] == [[False, True], [True, False]]
    form, note = page.locator("#benchmark form"), outcome.locator(".note")
    expect(note).to_be_hidden()
    fill(form, lengths="64")
    expect(note).to_be_visible()
    fill(form, lengths="32")
    expect(note).to_be_hidden()


@pytest.mark.slow
def test_a_stream_that_breaks_goes_on_behind_its_last_event(page):
    sent = []

    def break_once(route):
        sent.append(route.request.headers.get("last-event-id"))
        if len(sent) > 1:
            route.continue_()
            return
        answer = route.fetch()  # the benchmark has ended, so the stream is complete
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


@pytest.mark.slow
def test_with_a_key_a_benchmark_is_watched(open_page, start_server):
    page = open_page(start_server(api_keys="secret-1"))
    enter(page, "secret-1")
    expect(page.locator("#health")).to_have_text("Ready")
    never_known(page)
    start_benchmark(page, lengths="2048, 2049", seconds=400)
    expect(said(page, "benchmark")).to_contain_text("of 4")  # the stream of events, which needs the key, works
    page.get_by_role("button", name="Cancel").click()
    expect(said(page, "benchmark")).to_contain_text("Cancelled")


@pytest.mark.slow
def test_the_axis_of_times_holds_their_whiskers(page):
    """If p80 is 100 times p20, as on a busy machine, the axis still contains the whiskers of the newest row."""
    script = """async ([rows]) => {
        const { plot } = await import("/static/plot.js");
        const { charts } = await import("/static/chart.js");
        const element = document.body.appendChild(document.createElement("div"));
        for (let count = 2; count <= rows.length; count += 1) plot(element, "time", rows.slice(0, count), {});
        await new Promise((resolve) => setTimeout(resolve)); // the chart is drawn behind what runs now
        const { scales } = charts.get(element.firstChild).plot;
        return [scales.y.min, scales.y.max];
    }"""
    same = {"dtype": "float32", "head_dim": 16, "value_dim": 16, "q_heads": 1, "kv_heads": 1, "causal": False,
            "direction": "forward", "backend": "cpu", "skipped": None}  # fmt: skip
    times = {32: 1, 64: 2, 128: 9}
    rows = [{**same, "kv_len": n, "ms": ms, "ms_p20": ms / 10, "ms_p80": ms * 10} for n, ms in times.items()]
    low, high = page.evaluate(script, [rows])
    assert low < 0.1 < 90 < high


def test_the_head_of_the_table_passes_below_the_navigation(page):
    page.set_viewport_size({"width": 1280, "height": 400})
    show_rows(page, [row("naive", 32 * n) for n in range(1, 31)])
    expect(page.locator("#playground .outcome")).to_be_visible()  # the playground's answer moves the benchmark down
    above = page.evaluate("""() => {
        const middle = (each) => {
            const { left, right, top, bottom } = each.getBoundingClientRect();
            return [(left + right) / 2, (top + bottom) / 2];
        };
        const head = document.querySelector("#benchmark thead th:last-child");
        const bar = document.querySelector("nav");
        scrollBy({ top: middle(head)[1] - middle(bar)[1], behavior: "instant" });
        const [x, y] = middle(head);
        return bar.getBoundingClientRect().bottom > y && bar.contains(document.elementFromPoint(x, y));
    }""")
    assert above
