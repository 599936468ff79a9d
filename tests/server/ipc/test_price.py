"""The price of a request, its FLOPs and predicted seconds, is computed from shapes, and anew when lengths are known."""

import numpy as np
import pytest

from flashpoint_contract.options import Options
from flashpoint_contract.spec import plan
from flashpoint_contract.tensors import TensorInfo
from flashpoint_kernels.problems.cost import NOMINAL, Rates
from flashpoint_server.access.admission import Admission
from flashpoint_server.config.settings import Settings
from flashpoint_server.ipc.messages import DeviceInfo
from flashpoint_server.ipc.price import MOST_FLOPS, Price, price_of, verification_price
from tests.support.admitted import Entered

RATES = {
    "cpu": Rates(call=1.0, sequence=0.01, flop=1e-6, score=0.0, options={"bool_mask": 0.1}),
    "tiled": Rates(call=2.0, sequence=0.02, flop=1e-6, score=1e-3, options={"dropout": 1.0}),
    "reference": Rates(call=3.0, sequence=0.03, flop=1e-6, score=0.0, options={}),
}
DEVICE = DeviceInfo("cpu", "a test", 1 << 30, tuple(RATES), 1e9, RATES, 2)


def spec_of(shape, options=Options(), **more):  # noqa: B008
    infos = dict.fromkeys("qkv", TensorInfo("float32", shape))
    return plan(infos | {n: TensorInfo(*info) for n, info in more.items()}, options, "forward")


@pytest.mark.parametrize("name", sorted(RATES))
def test_each_backend_has_its_rates(name):
    price = price_of(spec_of((4, 2, 1, 8)), name, DEVICE)
    rates = RATES[name]
    flops = 4 * 2 * 2 * (8 + 8)
    assert price == (flops, pytest.approx(rates.call + 4 * rates.sequence + flops * rates.flop + 8 * rates.score))


def test_a_sequence_and_an_option_have_a_price_of_their_own():
    few, many = spec_of((1, 8192, 1, 1)), spec_of((8192, 1, 1, 1))
    assert few.flops == many.flops
    assert price_of(many, "cpu", DEVICE).seconds > 50 * price_of(few, "cpu", DEVICE).seconds
    plain, dropped = spec_of((1, 1, 8, 8)), spec_of((1, 1, 8, 8), Options(dropout_p=0.5))
    assert price_of(dropped, "tiled", DEVICE).seconds - price_of(plain, "tiled", DEVICE).seconds == pytest.approx(64)
    masked = spec_of((1, 1, 8, 8), attn_mask=("bool", (8, 8)))
    assert price_of(masked, "cpu", DEVICE).seconds - price_of(plain, "cpu", DEVICE).seconds == pytest.approx(6.4)


def test_lengths_lower_the_price_and_it_is_counted_again():
    spec = spec_of((3, 1, 10, 4), q_lengths=("int64", (3,)), kv_lengths=("int64", (3,)))
    index = {"q_lengths": np.array([10, 1, 0]), "kv_lengths": np.array([10, 1, 5])}
    upper, exact = price_of(spec, "cpu", DEVICE), price_of(spec, "cpu", DEVICE, index)
    assert (upper.flops, exact.flops) == (300 * 16, 101 * 16)
    assert exact.seconds < upper.seconds
    admission = Admission(Settings())
    with Entered(admission, 0) as permit:
        permit.charge(upper)
        permit.correct(exact)
        assert (admission.flops, admission.seconds) == exact
        assert permit.price == exact
    assert (admission.flops, admission.seconds) == (0, pytest.approx(0))


def test_a_price_fits_a_message():
    huge = spec_of((1 << 20, 1 << 20, 1 << 20, 1 << 20))
    assert price_of(huge, "cpu", DEVICE).flops == MOST_FLOPS
    assert verification_price(huge, DEVICE).flops == MOST_FLOPS


def test_a_verification_costs_three_references():
    spec = spec_of((1, 1, 4, 64))
    assert verification_price(spec, DEVICE) == Price(spec.flops, 3 * price_of(spec, "reference", DEVICE).seconds)


def test_each_backend_has_the_constants_that_cut_a_request_into_parts():
    assert set(NOMINAL) == {"cpu", "torch", "tiled", "reference", "triton"}
