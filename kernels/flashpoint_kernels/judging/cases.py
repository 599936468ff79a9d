"""Make the cases on which a function is judged: sizes, options and values."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flashpoint_contract.wording.hints import did_you_mean
from flashpoint_kernels.judging.values import EXACT, KINDS

HALF = ("bfloat16", "float16")
TYPES = ("float32", *HALF)


OUTPUTS = ("o", "lse", "dq", "dk", "dv")
ANSWERS = (*OUTPUTS, "dattn_mask", "dsinks")


@dataclass(frozen=True)
class Case:
    """One problem: sizes, data type, options, values, and the seed that they are drawn from.

    - `mask`: the dtype of attn_mask, `bool` or `float`, or "" for no mask. Its shape is (B, Hq, Sq, Sk), unless a
      suffix names another: `-keys` (B, 1, 1, Sk), `-heads` (1, Hq, Sq, Sk), `-one` (B, 1, Sq, Sk), `-plane` (Sq, Sk),
      `-rows` (B, Hq, Sq, 1). Suffixes for hidden keys: `-tiles` hides whole tiles, `-empty` whole rows.
    - `extras`: other tensors, of `alibi_slopes`, `sinks` and `kv_lengths`.
    - `ones`: the gradient of o is 1 everywhere, as after `o.sum().backward()`.
    - `forward`: no gradients are requested.
    - `bare`: lse is not requested.
    - `unlike`: the sequences have unlike lengths, at most q_len and kv_len; some have no queries, or no keys.
    """

    values: str = "normal"
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    q_len: int = 1
    kv_len: int = 1
    head_dim: int = 16
    value_dim: int = 16
    dtype: str = "float32"
    seed: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    mask: str = ""
    extras: tuple[str, ...] = ()
    ones: bool = False
    forward: bool = False
    bare: bool = False
    unlike: bool = False
    dropout: float = 0.0
    alignment: str = "bottom_right"
    layout: str = field(default="", compare=False)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def scores(self) -> int:
        return self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def programs(self) -> int:
        """Return how many programs a kernel with tiles of 64 queries starts."""
        return self.batch * self.q_heads * -(-self.q_len // 64)

    @property
    def options(self) -> frozenset[str]:
        """Return the names of the options that differ from their defaults."""
        used = {name for name in ("causal", "softcap") if getattr(self, name)}
        used |= {"window"} if self.window != (-1, -1) else set()
        used |= {"scale"} if self.scale is not None else set()
        return frozenset(used | ({"attn_mask"} if self.mask else set()) | set(self.extras))

    def without(self, option: str) -> Case:
        """Return the case without one of its `options`."""
        if option in self.extras:
            return replace(self, extras=tuple(each for each in self.extras if each != option))
        name = "mask" if option == "attn_mask" else option
        return replace(self, **{name: getattr(_USUAL, name)})

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, self.value_dim)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Return the lengths of queries and keys of each sequence."""
        if not self.unlike or self.batch == 1:
            return [(self.q_len, self.kv_len)] * self.batch
        draw = random.Random(self.seed)
        lengths = [(draw.randint(1, self.q_len), draw.randint(1, self.kv_len)) for _ in range(self.batch)]
        lengths[0] = self.q_len, self.kv_len
        if self.batch > 3:
            lengths[1:3] = [(0, lengths[1][1]), (lengths[2][0], 0)]
        draw.shuffle(lengths)
        if self.q_len == self.kv_len:  # packed q, k and v have the same lengths
            lengths = [(min(pair), min(pair)) for pair in lengths]
        return lengths

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, for `from_dict`."""
        fields, usual = asdict(self), asdict(Case())
        sizes = ("values", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim", "dtype", "seed")
        kept = {name: v for name, v in fields.items() if name in sizes or v != usual[name]}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Case:
        """Return the case from a dict that `to_dict` returned. Raises ValueError."""
        fields = cls.__dataclass_fields__
        if unknown := [name for name in given if name not in fields]:
            raise ValueError(f"a case has no field {unknown[0]!r}; it has {', '.join(fields)}")
        made: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        for name, usual in asdict(cls()).items():
            if (
                name in made
                and name != "scale"
                and type(made[name]) is not type(usual)
                and not isinstance(made[name], int)
            ):
                raise ValueError(f"{name} must be of type {type(usual).__name__}, not {made[name]!r}")
        case = cls(**made)
        sizes = case.shape
        if any(not isinstance(n, int) or n < 1 for n in sizes) or case.q_heads % case.kv_heads:
            raise ValueError(f"sizes must be positive, and q_heads a multiple of kv_heads: {sizes}")
        if case.values not in KINDS:
            raise ValueError(f"values must be one of {', '.join(KINDS)}, not {case.values!r}")
        if case.dtype not in TYPES:
            near = did_you_mean(str(case.dtype), TYPES)
            raise ValueError(f"dtype must be one of {', '.join(TYPES)}, not {case.dtype!r}{near}")
        return case

    def __str__(self) -> str:
        sizes = [f"B {self.batch}"]
        pairs = (
            ("H", self.q_heads, self.kv_heads),
            ("N", self.q_len, self.kv_len),
            ("D", self.head_dim, self.value_dim),
        )
        sizes += [f"{name} {a}" if a == b else f"{name} {a}/{b}" for name, a, b in pairs]
        said = [f"{n}={getattr(self, n)}" for n in ("softcap", "scale") if n in self.options]
        said += ["causal"] if self.causal else []
        said += [f"window={list(self.window)}"] if "window" in self.options else []
        said += [f"{self.mask} attn_mask"] if self.mask else []
        said += [*self.extras, *(["do = 1"] if self.ones else []), *(["unlike lengths"] if self.unlike else [])]
        said += [f"dropout_p={self.dropout}"] if self.dropout else []
        values = [] if self.values == "normal" else [f"values {self.values!r}"]
        return ", ".join([f"{self.dtype} {' '.join(sizes)}", *said, *values])


_USUAL = Case()


def _case(values: str, shape: Sequence[int], **more: Any) -> Case:
    names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "value_dim")
    sizes: dict[str, Any] = dict(zip(names, (*shape, shape[-1]) if len(shape) == 6 else shape, strict=True))
    return Case(values=values, **sizes, **more)


BASE = (2, 4, 2, 33, 77, 64)  # sizes of the cases in `relations.py`, which tests purity and unusual memory forms


def hostile(seed: int, quick: bool) -> Iterator[Case]:
    """Yield the cases whose values expose mistakes of kernels, for each data type."""
    for dtype in TYPES:
        half = dtype != "float32"
        exact = {"dtype": dtype, "seed": seed}
        for values in EXACT:  # each data type represents these scores, so that rounding to it explains no error
            for causal in (False, True):
                yield _case(values, (1, 4, 2, 33, 200, 16), causal=causal, **exact)
        yield _case("low-exact", (1, 2, 2, 64, 128, 16), **exact)
        yield _case("rising-exact", (1, 1, 1, 8, 1100, 16), **exact)
        yield _case("edges", (1, 1, 1, 24, 1100, 64), **exact)
        yield _case("edges", (1, 1, 1, 24, 4200, 16), forward=quick, **exact)
        yield _case("gap-exact", (1, 1, 1, 8, 4200, 16), forward=quick, **exact)
        yield _case("rising", (1, 4, 2, 1, 4200, 64), **exact)  # decoding, where each split has a larger maximum
        yield _case("flat", (1, 2, 1, 3, 4200, 16), **exact)
        yield _case("flat", (1, 2, 1, 1100, 40, 64), **exact)
        for values in ("massive", "low", "neg", "high", "gap", "rising", "lastmax", "ties", "dup", "edges", "offset",
                       "tiny"):  # fmt: skip
            causal = values in ("neg", "high", "ties", "offset")
            yield _case(values, (1, 4, 2, 33, 200, 64), causal=causal, **exact)
            if not half and not quick:
                yield _case(values, (2, 2, 1, 70, 130, 80), causal=not causal, **exact)
        yield _case("unseen", (1, 4, 2, 40, 60, 64), causal=True, **exact)
        yield _case("unseen", (2, 2, 2, 100, 40, 64), causal=True, **exact)
        yield _case("massive", (2, 2, 1, 20, 50, 80), causal=True, **exact)
        yield _case("rising", (1, 2, 1, 40, 150, 16), causal=True, **exact)
        yield _case("small", (1, 2, 2, 33, 77, 64), **exact)
        yield _case("normal", (1, 2, 2, 33, 77, 64), ones=True, **exact)
        yield _case("sharp", (1, 2, 1, 33, 130, 64), causal=True, **exact)


def large(seed: int, quick: bool) -> Iterator[Case]:
    """Yield cases with many keys, queries, heads or programs."""
    more: dict[str, Any] = {"seed": seed}
    for number, dtype in enumerate(TYPES):
        yield _case("normal", (1, 70, 70, 5, 20, 16), dtype=dtype, **more)
        yield _case("normal", (1, 1, 1, 1100, 77, 64), dtype=dtype, causal=number == 1, **more)
        yield _case("normal", (1, 2, 1, 257, 257, 128), dtype=dtype, causal=True, **more)
        yield _case("edges", (1, 1, 1, 6, 17000, 16), dtype=dtype, forward=True, **more)
        if not quick:
            yield _case("normal", (1, 2, 2, 600, 600, 64), dtype=dtype, causal=True, **more)
            yield _case("sharp", (1, 1, 1, 300, 2100, 64), dtype=dtype, causal=True, **more)
    yield _case("normal", (8200, 8, 8, 1, 2, 16), forward=True, **more)
    yield _case("edges", (1, 1, 1, 6, 70000, 16), forward=True, **more)
    yield _case("aimed", (1, 1, 1, 1100, 1100, 16), causal=True, forward=quick, **more)
    yield _case("edges", (1, 1, 1, 3, 17000, 16), dtype="bfloat16", **more)


# Classes of lengths (queries, keys). Where one side is long, the other has at most 16 rows or 40 keys.
CLASSES: dict[str, tuple[tuple[int, int], ...]] = {
    "one tile": ((7, 13), (16, 16), (5, 3), (12, 9)),
    "around tiles": ((15, 17), (33, 31), (63, 65), (65, 63), (127, 129), (129, 127), (128, 128), (64, 64), (17, 33)),
    "several tiles": ((70, 200), (100, 150), (150, 100), (130, 190)),
    "multiples of 256": ((8, 256), (16, 512), (16, 768), (256, 40), (512, 24)),
    "near multiples of 256": ((8, 255), (9, 513), (5, 257), (7, 511), (257, 33), (255, 40), (511, 17), (6, 767)),
    "1,024 keys": ((6, 1024), (8, 1023), (5, 1025), (6, 2048), (4, 1500), (4, 2047), (4, 3072)),
    "4,096 keys": ((4, 4096), (5, 4200), (3, 4097), (4, 5120), (3, 6000)),
    "8,192 keys": ((3, 8192), (2, 8300), (3, 9000), (2, 9216)),
    "1,024 queries": ((1100, 40), (1024, 24), (1025, 33), (2048, 16), (2100, 20)),
    "one query": ((1, 300), (1, 4200), (1, 77), (1, 1024), (1, 130), (1, 2100)),
    "several blocks": ((260, 390), (300, 270), (257, 400), (384, 260)),
    "many programs": ((5, 130), (8, 80), (3, 150), (17, 70)),
}
_LONG = tuple(name for name in CLASSES if "," in name or name == "one query")
# (batch, q_heads, kv_heads): over 132 programs, and over 32 heads, so that each option meets both
_MANY = ((3, 48, 48), (4, 40, 8), (2, 70, 70), (4, 48, 6), (4, 34, 34))
_FEW = ((1, 2, 2), (2, 4, 2), (1, 8, 1), (3, 3, 3), (1, 16, 2), (2, 6, 3), (1, 16, 1), (1, 5, 1))
_DIMS = ((64, 64), (128, 128), (72, 72), (32, 32), (104, 104), (16, 16), (112, 112), (96, 96), (80, 80), (48, 48),
         (192, 192), (40, 40), (256, 256), (64, 32), (120, 120), (88, 88), (32, 64))  # fmt: skip
_DECODED = ((256, 256), (128, 128), (64, 64), (192, 192), (72, 72), (96, 64))
_MASKS = tuple(f"-{form}{hidden}" for hidden in ("-tiles", "", "-empty") for form in ("one", "keys", "plane", "heads"))


def _options(draw: random.Random, m: int, *, narrow: bool = False) -> dict[str, dict[str, Any]]:
    """Return the options that `crossed` combines, with values drawn for m keys; `narrow`: windows are small."""
    lefts = (15, 16, 20, 31) if narrow else (0, 1, 15, 16, 31, 63, 64, 100, 127, 255, 1000)
    left = draw.choice([n for n in lefts if n < m])
    right = draw.choice([n for n in ((0, 3, 16) if narrow else (0, 3, 16, 63, 200)) if n < m])
    masks = [mask.replace("-plane", draw.choice(("-plane", "-rows", ""))) for mask in draw.sample(_MASKS, 2)]
    return {
        "none": {}, "causal": {"causal": True}, "scale": {"scale": draw.choice((0.3, 1.0, 0.04, 0.25))},
        "softcap": {"softcap": draw.choice((1.5, 5.0, 20.0))},
        "causal window": {"causal": True, "window": (left, draw.choice((0, -1)))},
        "left window": {"window": (left, -1)}, "window": {"window": draw.choice(((left, right), (-1, right)))},
        "bool mask": {"mask": f"bool{masks[0]}"}, "float mask": {"mask": f"float{masks[1]}"},
        "alibi_slopes": {"extras": ("alibi_slopes",)}, "sinks": {"extras": ("sinks",)},
        "kv_lengths": {"extras": ("kv_lengths",)},
    }  # fmt: skip


def crossed(
    seed: int, quick: bool, takes: Iterable[str], ragged: bool, dtypes: Sequence[str] = TYPES
) -> Iterator[Case]:
    """Yield the cross of options and classes of lengths, and pairs of options, in the given types.

    Each length of a class occurs. With `quick`, each combination has one data type, with or without gradients, so that
    each pair of two of option, class, type and gradients occurs. Otherwise it has all of them.
    """
    draw, takes = random.Random(seed * 7919 + 5), set(takes)
    kinds = [(dtype, forward) for dtype in dtypes for forward in (False, True)]
    few, many, dims = (itertools.cycle(draw.sample(each, len(each))) for each in (_FEW, _MANY, _DIMS))
    of_decoding = itertools.cycle(draw.sample(_DECODED, len(_DECODED)))
    names = [name for name, given in _options(draw, 64).items() if Case(**given).options <= takes]
    short = [name for name in CLASSES if name not in (*_LONG, "many programs", "several blocks")]
    first, widest = draw.randrange(6), (min(dtypes, key=TYPES.index), False)  # 16 bits hide one of many terms
    rows: list[tuple[tuple[str, ...], str, tuple[int, int], tuple[str, bool]]] = []
    for number, (size, lengths) in enumerate(CLASSES.items()):
        shuffled = draw.sample(lengths, len(lengths))
        for n in range(max(len(names), len(lengths))):
            kind = kinds[(first + number + n + n // len(names)) % len(kinds)]
            rows.append(((names[n % len(names)],), size, shuffled[n % len(lengths)], kind))
        if "," in size:
            rows.append(((draw.choice(names[:2]),), size, lengths[-1], widest))
    for name in names:  # strips of a block may see no key
        if "window" in name:
            rows.append(((name,), "several blocks", draw.choice(CLASSES["several blocks"]), widest))
    for pair in itertools.combinations(names[1:], 2):
        rows.append((pair, "", draw.choice(CLASSES[draw.choice(short)]), draw.choice(kinds)))
    for chosen, size, (n, m), kind in rows:
        if len({"bool mask", "float mask"} & set(chosen)) > 1 or sum("window" in name for name in chosen) > 1:
            continue
        batch, q_heads, kv_heads = next(many if size == "many programs" else few)
        dim, value_dim = next(of_decoding if size == "one query" else dims)
        most = 48 if size == "many programs" or m > 6000 else 128 if size in _LONG and n > 1 else 256
        dim, value_dim = min(dim, most), min(value_dim, most)
        if size in _LONG and n > 1:
            batch, q_heads, kv_heads = draw.choice(((1, 2, 2), (1, 2, 1), (1, 8, 1)))
        if size == "several blocks":
            batch, q_heads, kv_heads = draw.choice(((1, 1, 1), (1, 2, 1)))
        given: dict[str, Any] = {}
        for name in chosen:
            option = _options(draw, m, narrow=size == "several blocks")[name]
            extras = given.get("extras", ()) + option.get("extras", ())
            given |= option | ({"extras": extras} if extras else {})
        values = "normal" if draw.random() < (0.25 if size in _LONG else 0.6) else "aimed"
        if size not in _LONG and draw.random() < (0.5 if "softcap" in given else 0.1):
            values = draw.choice(("high", "neg", "sharp"))
        if size == "several blocks":
            kind = ("bfloat16" if "bfloat16" in dtypes else dtypes[0], False)  # gradients of 16 bits differ most
        for dtype, forward in [kind] if quick else kinds:
            given |= {"bare": draw.random() < 0.4, "unlike": ragged and draw.random() < 0.8}
            sizes = (max(batch, 4) if given["unlike"] else batch, q_heads, kv_heads, n, m, dim, value_dim)
            yield _case(values, sizes, dtype=dtype, forward=forward, seed=seed, **given)


def edges(seed: int) -> Iterator[Case]:
    """Yield the smallest and the oddest shapes."""
    for dtype in TYPES:
        more: dict[str, Any] = {"dtype": dtype, "seed": seed}
        yield _case("normal", (1, 1, 1, 16, 1, 16), **more)
        yield _case("normal", (1, 2, 2, 1, 1, 64), causal=True, **more)
        yield _case("normal", (3, 2, 2, 1, 64, 64), causal=True, **more)
        yield _case("normal", (2, 2, 2, 65, 63, 64), causal=True, **more)
        yield _case("normal", (1, 2, 2, 129, 128, 64), causal=True, **more)
        yield _case("normal", (1, 1, 1, 200, 3, 32), causal=True, **more)
        yield _case("normal", (2, 4, 2, 1, 300, 64), causal=True, **more)  # decoding, with splits of the keys
        yield _case("normal", (1, 2, 1, 5, 1030, 64), causal=True, **more)
        yield _case("normal", (1, 2, 1, 33, 70, 192), causal=True, **more)
        yield _case("normal", (1, 1, 1, 20, 50, 256), **more)
        yield _case("normal", (2, 4, 2, 1, 150, 256), **more)


def usual(seed: int) -> Iterator[Case]:
    """Yield the first cases: most functions support them."""
    for dtype in TYPES:
        yield _case("normal", (2, 2, 2, 64, 64, 64), dtype=dtype, seed=seed)
        yield _case("normal", BASE, dtype=dtype, seed=seed)
        yield _case("normal", (1, 2, 2, 130, 130, 64), dtype=dtype, causal=True, seed=seed)
        yield _case("normal", (2, 4, 2, 33, 130, 64), dtype=dtype, causal=True, seed=seed)


def listed(
    seed: int, *, quick: bool, takes: Iterable[str], ragged: bool = False, dtypes: Sequence[str] = TYPES
) -> list[Case]:
    """Return all cases in these types without duplicates, in the order in which they are judged."""
    takes = set(takes)
    cases = [*usual(seed), *hostile(seed, quick), *edges(seed), *crossed(seed, quick, takes, ragged, dtypes)]
    cases = list(dict.fromkeys([*cases, *large(seed, quick)]))
    return [case for case in cases if case.options <= takes and case.dtype in dtypes]


def random_case(seed: int, takes: Iterable[str]) -> Case:
    """Return a case whose sizes, options and values all follow from the seed."""
    draw, takes = random.Random(seed), set(takes)
    n, m = draw.choice([1, 5, 33, 64, 100, 130, 257]), draw.choice([1, 7, 64, 77, 128, 200, 300])
    options = [given for given in _options(draw, m).values() if Case(**given).options <= takes]
    sizes = (*draw.choice(_FEW), n, m, *draw.choice(_DIMS))
    return _case(draw.choice(list(KINDS)), sizes, dtype=draw.choice(TYPES), seed=seed, **draw.choice(options))


def reseeded(case: Case, seed: int) -> Case:
    """Return the case with its own seed, computed from its fields and from `seed`."""
    return replace(case, seed=zlib.crc32(repr(replace(case, seed=seed)).encode()))


def varied(case: Case, seed: int) -> Case:
    """Return the case with lengths of the same kind that follow from `seed`, so that no function can know them.

    Multiples of 16, the smallest lengths, and equal lengths stay what they are; other lengths keep their multiple.
    """
    draw = random.Random(reseeded(case, seed).seed)

    def length(n: int) -> int:
        return n if n < 17 or n % 16 in (0, 1, 15) else n // 16 * 16 + draw.randint(2, 15)

    q_len, kv_len = length(case.q_len), length(case.kv_len)
    if (
        case.shape == (*BASE, BASE[-1])
        or case.values.endswith("-exact")
        or (q_len < kv_len) != (case.q_len < case.kv_len)
    ):
        return case
    return replace(case, q_len=q_len, kv_len=q_len if case.q_len == case.kv_len else kv_len)
