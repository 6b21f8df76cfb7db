"""The planner's page: what is on it, and that nothing of a result is read as HTML."""

import random
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from compose.planner.page import (
    CATEGORIES,
    COLOURS,
    STYLE,
    Scale,
    page_of,
    pareto_front,
    scale_for,
)

GIB = 2**30


def event_of(rank: int, stream: str, name: str, start: float, length: float) -> dict[str, Any]:
    """One bar of a timeline."""
    return {"rank": rank, "stream": stream, "name": name, "start": start, "end": start + length}


def timeline_of(ranks: int, micro_batches: int) -> list[dict[str, Any]]:
    """A pipeline's step: all forwards, all backwards, gathers beside them, and the optimizer."""
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        for i in range(micro_batches):
            begin = 0.010 * (ranks + micro_batches) + 0.020 * (ranks - rank + i)
            events += [
                event_of(rank, "compute", f"forward {i}", 0.010 * (rank + i), 0.009),
                event_of(rank, "tp", f"all_reduce {i}", 0.010 * (rank + i) + 0.004, 0.002),
                event_of(rank, "compute", f"backward {i}", begin, 0.019),
                event_of(rank, "gathers", f"all_gather layers.{i}", begin - 0.003, 0.004),
            ]
        end = 0.010 * (ranks + micro_batches) + 0.020 * (2 * ranks + micro_batches)
        events.append(event_of(rank, "reductions", "reduce_scatter", end - 0.02, 0.02))
        events.append(event_of(rank, "compute", "optimizer", end, 0.012))
    return events


def result_of(count: int, stages: int = 4, seed: int = 0) -> dict[str, Any]:
    """A result with candidates as the planner gives them, drawn."""
    draw = random.Random(seed)
    candidates = []
    for _ in range(count):
        tp = draw.choice([1, 2, 4, 8, 16])
        kept = draw.uniform(0.3, 1.6)
        by_stage = []
        for stage in range(stages):
            scale = GIB * kept * (1.1 - 0.05 * stage)
            use = {name: int(draw.uniform(0.5, 20) * scale) for name in CATEGORIES}
            size = sum(use.values())
            by_stage.append({"allocated": size, "reserved": int(1.07 * size), "by_category": use})
        fullest = max(by_stage, key=lambda use: use["reserved"])
        seconds = 8 + 2 / kept + 2 * draw.random()
        keys = {
            "train.micro_batch": draw.choice([1, 2, 4]),
            "parallel.dp_shard": 512 // tp // stages,
            "parallel.tp": tp,
            "parallel.pp": stages,
            "parallel.zero": draw.choice([1, 2, 3]),
            "parallel.pp_schedule": "Interleaved1F1B",
            "activation_checkpoint.mode": draw.choice(["none", "full", "selective"]),
        }
        candidates.append(
            {
                "keys": keys,
                "fits": fullest["reserved"] < 79 * GIB,
                "step_seconds": seconds,
                "tokens_per_second_per_device": 512 * 8192 / seconds / 512,
                "mfu": 4.6 / seconds,
                "bubble": draw.uniform(0.02, 0.2),
                "lacks": "",
                "exposed": {"tp": draw.uniform(0, 1.2), "dp": draw.uniform(0, 0.4), "pp": 0.0},
                "memory": {**fullest, "by_stage": by_stage},
                "timeline": [],
            }
        )
    candidates.sort(key=lambda each: (not each["fits"], each["step_seconds"]))
    for i, candidate in enumerate(candidates):
        tp = candidate["keys"]["parallel.tp"]
        candidate["why"] = f"candidate {i}: tp {tp} leaves the node: +41 ms a layer"
        candidate["timeline"] = [] if i else timeline_of(stages, 16)
    return {
        "cluster": "h100_sxm",
        "world_size": 512,
        "model": "llama3 70b",
        "global_batch": 512,
        "seq_len": 8192,
        "capacity": 79 * GIB,
        "candidates": candidates,
    }


def memory_of(reserved: float, **sizes: float) -> dict[str, Any]:
    """The memory of a candidate whose ranks are equal."""
    use = {"reserved": reserved, "allocated": sum(sizes.values()), "by_category": sizes}
    return {**use, "by_stage": [use]}


class Reader(HTMLParser):
    """A page's text, its tags, and whether each is closed in order."""

    VOID = ("meta", "br", "line", "rect", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.tags
            if name == tag and (not kind or kind in (attrs.get("class") or "").split())
        ]


def test_every_candidate_is_there() -> None:
    result = result_of(37)
    page = page_of(result)
    reader = Reader(page)
    for candidate in result["candidates"]:
        assert candidate["why"] in reader.text
    assert len(reader.of("tr")) == 1 + 37
    assert len(reader.of("circle", "dot")) == 37
    assert len(reader.of("circle", "best")) == 1
    # A stage has a bar, with eight categories and what is reserved and not in use.
    assert len([bar for bar in reader.of("svg") if "weights" in (bar.get("aria-label") or "")]) == 4
    assert page.count("reserved, not in use: ") == 4
    assert page.count("weights: ") == 4


def test_no_network() -> None:
    page = page_of(result_of(5))
    assert not [word for word in ("http", "url(", "@import", "fetch(") if word in page]
    for _, attrs in Reader(page).tags:
        assert not {"src", "href", "srcset", "data"} & set(attrs)


def test_headline() -> None:
    result = result_of(3)
    keys = {"parallel.tp": 8, "parallel.pp": 4, "parallel.dp_shard": 16, "parallel.cp": 1}
    keys["train.global_batch"] = 1024  # which is free
    result["candidates"][0].update(keys=keys, fits=True, step_seconds=9.87654, mfu=0.4321)
    result["candidates"][0]["tokens_per_second_per_device"] = 1234.4
    result["candidates"][0]["memory"] = memory_of(71.2 * GIB, weights=GIB)
    result["sentences"] = ["Run it so.", "This takes 3 & more days."]
    text = Reader(page_of(result)).text
    for words in [
        *result["sentences"],
        "llama3 70b on 512 \u00d7 h100_sxm, 1,024 samples of 8,192 tokens a step",
        "Best: pp 4 \u00d7 dp_shard 16 \u00d7 tp 8",
        "4 pipeline stages, 16 data-parallel shards, 8 tensor-parallel ranks;"
        " train.global_batch = 1024.",
        "9.88 s",
        "43.2%",
        "1,234",
        "632,013 in all",
        "71.2 GiB",
        "of 79.0 GiB, 90.1%",
    ]:
        assert words in text, words


def test_nothing_fits() -> None:
    result = result_of(2)
    result["candidates"][0].update(fits=False)
    result["candidates"][0]["memory"] = memory_of(82.5 * GIB, weights=80 * GIB)
    text = Reader(page_of(result)).text
    assert any(words.startswith("Nothing fits. The least short: ") for words in text)
    assert "It lacks 3.50 GiB." in text
    assert "over by 3.50 GiB" in text
    result["candidates"][0]["lacks"] = "needs 900 GiB of host memory, a node has 500"
    assert "It needs 900 GiB of host memory, a node has 500." in Reader(page_of(result)).text


HOSTILE = "<script>alert(1)</script>\"' onload=x & <b>"


def test_strings_are_escaped() -> None:
    """Every string of a result becomes HTML in turn: the page has the tags it had without."""
    changes = 0

    def changed(value: Any, at: int) -> tuple[Any, int]:
        """The value with its ``at``-th string, names of settings too, replaced; and how many it has."""
        if isinstance(value, str):
            return (HOSTILE + value if at == 0 else value), 1
        if isinstance(value, (list, tuple)):
            pairs = list(enumerate(value))
        elif isinstance(value, dict):
            pairs = list(value.items())
        else:
            return value, 0
        results, count = [], 0
        for name, each in pairs:
            new, more = changed(each, at - count)
            count += more
            results.append((name, new))
        return (dict(results) if isinstance(value, dict) else [each for _, each in results]), count

    result = result_of(3, stages=2)
    result["candidates"][0]["timeline"] = timeline_of(1, 1)
    result["candidates"][0]["keys"]["model.note"] = "x"
    for candidate in result["candidates"]:
        del candidate["lacks"]  # is shown where nothing fits
    _, total = changed(result, -1)
    plain = sorted({tag for tag, _ in Reader(page_of(result)).tags})
    for at in range(total):
        page = page_of(changed(result, at)[0])
        reader = Reader(page)
        assert sorted({tag for tag, _ in reader.tags}) == plain
        assert len(reader.of("script")) == 1
        assert not any("onload" in attrs for _, attrs in reader.tags)
        changes += "&lt;script&gt;" in page
    # Every string of the result is on the page.
    assert changes == total
    hidden = result_of(2)
    for candidate in hidden["candidates"]:
        candidate["keys"][HOSTILE] = HOSTILE
    hidden["candidates"][0]["exposed"][HOSTILE] = 1.0
    hidden["candidates"][0]["memory"]["by_stage"][0]["by_category"][HOSTILE] = GIB
    assert len(Reader(page_of(hidden)).of("script")) == 1
    assert "onload" not in str([attrs.keys() for _, attrs in Reader(page_of(hidden)).tags])


def test_one_candidate() -> None:
    reader = Reader(page_of(result_of(1, stages=1)))
    assert len(reader.of("circle", "dot")) == 1
    assert len(reader.of("tr")) == 2
    assert "Each rank" in reader.text


@pytest.mark.parametrize("seed", range(30))
def test_front_is_what_nothing_beats(seed: int) -> None:
    draw = random.Random(seed)
    values = range(12) if seed % 2 else [draw.random() for _ in range(1000)]
    points = [(float(draw.choice(values)), float(draw.choice(values))) for _ in range(60)]
    unbeaten = [
        i
        for i, (time, size) in enumerate(points)
        if not any(t <= time and s <= size and (t, s) != (time, size) for t, s in points)
    ]
    front = pareto_front(points)
    assert sorted(front) == unbeaten
    assert [points[i] for i in front] == sorted(points[i] for i in front)
    assert pareto_front([]) == []


def test_front_is_drawn() -> None:
    """The dots on the front are marked, and the line has two parts between each two of them."""
    result = result_of(40)
    points = [(each["step_seconds"], each["memory"]["reserved"]) for each in result["candidates"]]
    reader = Reader(page_of(result))
    front = pareto_front(points)
    assert len(reader.of("circle", "on")) == len(front)
    assert len(reader.of("line", "front")) == 2 * (len(front) - 1)


def numbers_in(attrs: dict[str, str | None], *names: str) -> list[float]:
    return [float((attrs[name] or "").rstrip("%")) for name in names]


def test_bars_are_to_scale() -> None:
    """The parts of a bar follow one another, and their widths are as their bytes."""
    result = result_of(1, stages=1)
    result["capacity"] = 80 * GIB
    use = memory_of(40 * GIB, weights=10 * GIB, optimizer=20 * GIB, logits=5 * GIB)
    result["candidates"][0]["memory"] = use
    reader = Reader(page_of(result))
    parts = [bar for kind in ("c0", "c2", "c7", "held") for bar in reader.of("rect", kind)[:1]]
    unit = 100 / (1.04 * 80)
    expected = [(0, 10), (10, 20), (30, 5), (35, 5)]
    for part, (start, size) in zip(parts, expected, strict=True):
        assert numbers_in(part, "x", "width") == pytest.approx([start * unit, size * unit], abs=2e-3)
    line = next(line for line in reader.of("line", "capacity") if line["y2"] == "28")
    assert numbers_in(line, "x1", "x2") == pytest.approx([80 * unit] * 2, abs=2e-3)


def test_timeline_is_to_scale() -> None:
    result = result_of(1)
    result["candidates"][0]["timeline"] = [
        event_of(3, "compute", "forward 1", 1.0, 0.5),
        event_of(3, "tp", "all_reduce", 2.0, 1.0),
    ]
    page = page_of(result)
    bars = [attrs for attrs in Reader(page).of("rect") if attrs.get("stroke") == "#ffffff"]
    left = numbers_in(bars[0], "x")[0]
    places = [numbers_in(bar, "x", "width") for bar in bars]
    assert places == [[left, 300], [left + 600, 600]]
    assert len({bar["y"] for bar in bars}) == 2
    assert "forward 1: 500 ms, 0 to 0.50 s (rank 3, compute)" in page


def test_what_is_too_short_is_one() -> None:
    """A hundred thousand short pieces make a page of a size that a browser shows."""
    result = result_of(1)
    result["candidates"][0]["timeline"] = [
        event_of(0, "compute", f"forward {i}", i * 1e-4, 1e-4) for i in range(100_000)
    ]
    page = page_of(result)
    assert len(page) < 3_000_000
    assert "times forward" in page
    for i, event in enumerate(result["candidates"][0]["timeline"][:10]):
        event["name"] = f"{('forward', 'backward')[i % 2]} {i}"
    page = page_of(result)
    assert all(f"<title>backward {i}: " in page for i in range(1, 10, 2))


@pytest.mark.parametrize("seed", range(20))
def test_scales(seed: int) -> None:
    """Ticks are round, inside, and neither too few nor too many; values have their place."""
    draw = random.Random(seed)
    low = 10 ** draw.uniform(*((-6, 6) if seed < 15 else (-40, 60)))
    scale = scale_for([low, low * draw.choice([1, 1.01, 2, 7, 9, 1000])])
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 7
    assert all(scale.low <= tick <= scale.high * (1 + 1e-9) for tick in ticks)
    assert all(-1e-6 <= scale(tick) <= 100 + 1e-6 for tick in ticks)
    assert scale(scale.low) == 0
    assert scale(scale.high) == pytest.approx(100)
    assert Scale(0, 50).ticks() == [0, 10, 20, 30, 40, 50]
    assert Scale(1, 1000, log=True)(10) == pytest.approx(100 / 3)


def contrast(one: str, two: str) -> float:
    """The contrast of two colours, 1 to 21, as WCAG 2 defines it."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted([light(one), light(two)], reverse=True)
    return (high + 0.05) / (low + 0.05)


LIGHT, DARK = (
    dict(re.findall(r"--(\w+):(#\w{6});", part))
    for part in STYLE.partition("{box-sizing")[0].split("@media")
)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(colours: dict[str, str]) -> None:
    for ground in ("page", "card", "lane"):
        for text in ("text", "quiet", "bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5
        for drawn in [name for name in colours if re.fullmatch(r"c\d|other|held", name)]:
            assert contrast(colours[drawn], colours[ground]) >= 3, (drawn, ground)
    assert set(LIGHT) == set(DARK)
    assert [*COLOURS] == [LIGHT[f"c{i}"] for i in range(8)]


def test_waits_are_not_called_communication() -> None:
    """A device alone waits for no message, and its step of the optimizer is among its waits."""
    alone = result_of(1, stages=1)
    alone["candidates"][0]["exposed"] = {"optimizer": 0.5}
    page = page_of(alone)
    assert "communication that nothing hides" not in page
    assert "and for the optimizer" in page
