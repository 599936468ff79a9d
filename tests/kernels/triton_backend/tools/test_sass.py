"""The checks of SASS find writes to registers that a running product uses."""

import pytest

from flashpoint_kernels.triton_backend.tools.sass import Code

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0 ;"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


def code(*lines: str) -> Code:
    text = "\n".join(line if line.endswith(":") else f"        /*0000*/    {line}" for line in lines)
    return Code(text)


@pytest.mark.parametrize(
    ("written", "hazard"),
    [
        ("MOV R91, R2 ;", True),  # the product reads R88 to R91
        ("MOV R92, R2 ;", False),
        ("LDS.128 R84, [R2] ;", False),
        ("LDS.128 R85, [R2] ;", True),
        ("@P0 FADD R55, R2, R3 ;", True),  # the product accumulates in R24 to R55
        ("FADD R56, R24, R3 ;", False),
        ("IMAD.WIDE.U32 R22, R2, R3, R4 ;", False),
        ("IMAD.WIDE.U32 R23, R2, R3, R4 ;", True),
        ("ISETP.GE.AND P0, PT, R24, R2, PT ;", False),
        ("LOP3.LUT P1, R24, R2, R3, RZ, 0xc0, !PT ;", True),
        ("STS.128 [R24], R88 ;", False),
        ("R2UR UR4, R24 ;", False),
        ("R2P PR, R24, 0x7f ;", False),
    ],
)
def test_a_write_to_registers_of_a_running_product_is_found(written: str, hazard: bool) -> None:
    assert code(PRODUCT, written, WAIT, "EXIT ;").hazards() == ([written] if hazard else [])
    assert code(PRODUCT, WAIT, written, "EXIT ;").hazards() == []


def test_a_product_that_runs_around_a_loop_is_found() -> None:
    early = "MOV R88, R2 ;"
    loop = (".L_x_1:", early, PRODUCT, "@P0 BRA `(.L_x_1) ;", WAIT, "EXIT ;")
    assert code(*loop).hazards() == [early]
    assert code(*loop[:2], PRODUCT, WAIT, *loop[3:]).hazards() == []
    skipped = (PRODUCT, "BRA `(.L_x_2) ;", early, ".L_x_2:", WAIT, "EXIT ;")
    assert code(*skipped).hazards() == []


def test_a_wait_may_leave_newer_products_running() -> None:
    second = PRODUCT.replace("R24", "R120").replace("R88", "R92")
    wait = WAIT.replace("0x0", "0x1")
    assert code(PRODUCT, second, wait, "MOV R88, R2 ;", "EXIT ;").hazards() == []
    assert code(PRODUCT, second, wait, "MOV R92, R2 ;", "EXIT ;").hazards() == ["MOV R92, R2 ;"]
