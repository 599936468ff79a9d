"""Operate the server's web page in a browser for its tests, and read values from it."""

import json
import subprocess
import sys

PATIENCE_MS = 240_000  # milliseconds for any action; only a hang takes so long

# Returns for each chart: its title, its x values, its lines by name, and the points outside its axes or not painted.
_DRAWN = """async (selector) => {
    const { charts } = await import("/static/chart.js");
    return [...document.querySelectorAll(selector)].map((element) => {
        const { plot, spec } = charts.get(element);
        const { left, top, width, height } = plot.bbox;
        const lost = [];
        const lines = spec.series.map(({ name, values }) => [name, values]);
        for (const [name, values] of lines) values.forEach((value, i) => {
            if (value === null) return;
            const [x, y] = [plot.valToPos(plot.data[0][i], "x", true), plot.valToPos(value, "y", true)];
            const inside = x >= left && x <= left + width && y >= top && y <= top + height;
            const pixels = plot.ctx.getImageData(Math.round(x) - 1, Math.round(y) - 1, 3, 3).data;
            const painted = pixels.some((part) => part > 0);
            if (!inside || !painted) lost.push([name, i, x, y]);
        });
        return { title: spec.title, x: spec.data, lines: Object.fromEntries(lines), lost };
    });
}"""


def fill(form, **values):
    for name, value in values.items():
        form.locator(f'[name="{name.replace("__", ".")}"]').fill(str(value))


def enter(page, key):
    """Type a key into the page's key dialog."""
    page.locator("#key").get_by_label("Key").fill(key)
    page.locator("#key").get_by_role("button").click()


def start_benchmark(page, lengths="32, 64", backends="naive, cpu", seconds=0.02):
    form = page.locator("#benchmark form")
    fill(form, lengths=lengths, shape__q_heads=2, shape__head_dim=16, max_seconds=seconds, backends=backends)
    form.get_by_role("button", name="Start").click()


def never_known(page):
    """Make the page's benchmarks request an unreachable precision, so that each case runs as long as it may."""

    def with_precision(route):
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "relative_precision": 1e-9}))

    page.route("**/benchmark", with_precision)


def said(page, section):
    return page.locator(f"#{section} .said")


def cells(page, section):
    rows = page.locator(f"#{section} .result .scroll tbody tr")
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


def drawn(page, selector):
    """Return the charts of a part of the page, each a dict of title, x, lines by name, and invisible points."""
    return page.evaluate(_DRAWN, selector)


def run_shown_code(page, section, language):
    """Run the code that the page shows, and return its output."""
    page.locator(f"#{section}-code").get_by_label(language).check()
    code = page.locator(f"#{section}-code code").inner_text()
    command = [sys.executable, "-c", code] if language == "Python" else ["bash", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
