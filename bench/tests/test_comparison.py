"""Rounds over scripted engines: who is asked when, who is left out, and what comes of it."""

import json
import tempfile
import types
import unittest
import xml.etree.ElementTree as xml
from pathlib import Path

import compare
import plot
import summary
from engines import Failed

SVG = "{http://www.w3.org/2000/svg}"


class Scripted:
    """Decodes at `base` times the conversations; fails from `fails` conversations on."""

    serves = False

    def __init__(self, name, base, asked, fails=99):
        self.name, self.base, self.asked, self.fails, self.version = name, base, asked, fails, "1"
        self.demands = {}

    def program(self, model):
        weight = {"bytes": 1000, "kind": "matrix", "shape": [10, 50]}
        return {
            "groups": [{"place": "layer", "layers": [0, 1], "operations": [{"name": "linear", "weights": [weight]}]}]
        }

    def rate(self, model, threads, work):
        self.asked.append((self.name, work.conversations))
        if work.conversations >= self.fails:
            raise Failed("GGML_ASSERT")
        return self.base * work.conversations


def compared(folder, pairs=3):
    """A whole comparison; the order in which the engines were asked, and the results."""
    asked = []
    engines = [Scripted("motet", 30, asked), Scripted("llama.cpp", 10, asked), Scripted("ik_llama.cpp", 15, asked, 2)]
    options = types.SimpleNamespace(
        measure=["decode"], threads=[2], pairs=pairs, contexts=[128], conversations=[1, 4], decode=8,
        memory_context=2048, words=1, tokens=1, out=Path(folder),
    )  # fmt: skip
    comparison = compare.Comparison(options, engines, Scripted("machine", 60, asked))
    compare.say = lambda *_: None
    comparison.model(Path("some.gguf"))
    return asked, json.loads((Path(folder) / "results.json").read_text())


class Rounds(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def test_engines_alternate_and_every_round_begins_with_another(self):
        asked, _ = compared(self.folder.name)
        alone = [name for name, conversations in asked if conversations == 1]
        order = ["motet", "llama.cpp", "ik_llama.cpp", "machine"]
        self.assertEqual(alone, order + order[1:] + order[:1] + order[2:] + order[:2])

    def test_of_those_that_serve_each_begins_as_often(self):
        asked = []
        engines = [Scripted("motet", 3, asked), Scripted("llama.cpp", 1, asked), Scripted("ik_llama.cpp", 1, asked)]
        comparison = compare.Comparison(None, engines, Scripted("machine", 6, asked))
        engines[0].serves = engines[1].serves = True
        compare.say = lambda *_: None
        for turn in range(4):
            comparison.each(
                Path("m"), 2, turn, "http", 1, 8, lambda e: {"http": asked.append(e.name) or 1.0}, serves=True
            )
        self.assertEqual(asked, ["motet", "llama.cpp", "llama.cpp", "motet"] * 2)

    def test_who_fails_is_left_out_of_that_measurement_only_and_it_is_said(self):
        asked, results = compared(self.folder.name)
        self.assertEqual(asked.count(("ik_llama.cpp", 4)), 1)
        [out] = results["left_out"]
        self.assertEqual((out["engine"], out["reason"]), ("ik_llama.cpp", "GGML_ASSERT"))
        self.assertIn("GGML_ASSERT", (Path(self.folder.name) / "results.md").read_text())
        one, four = results["summary"]
        self.assertEqual((one["better peer"], one["ratio to better"]["median"]), ("ik_llama.cpp", 2.0))
        self.assertEqual((four["better peer"], four["ratio to better"]["median"]), ("llama.cpp", 3.0))
        self.assertEqual(four["of limit"]["motet"], {"median": 0.5, "low": 0.5, "high": 0.5, "n": 3})

    def test_tables_and_plot(self):
        compared(self.folder.name)
        table = (Path(self.folder.name) / "table.md").read_text()
        self.assertIn("| decode, 1 conversation, from position 128 | 30.0 (2.00×; 0.50 of the limit) |", table)
        full = (Path(self.folder.name) / "results.md").read_text()
        self.assertIn("| 120 | 40.0 | – | **3.00** (3.00–3.00) | 0.50 |", full)
        drawn = xml.parse(Path(self.folder.name) / "plot.svg").getroot()
        lines = {line.get("stroke"): line.get("points").split() for line in drawn.iter(f"{SVG}polyline")}
        self.assertEqual({colour: len(points) for colour, points in lines.items()},
                         {plot.COLOURS["motet"]: 2, plot.COLOURS["llama.cpp"]: 2, plot.COLOURS["ik_llama.cpp"]: 1})  # fmt: skip
        # motet's 120 tokens/s are the top of the axis, its 30 a quarter of the way up.
        up = [float(point.split(",")[1]) for point in lines[plot.COLOURS["motet"]]]
        self.assertEqual(up, [plot.TOP + plot.HEIGHT * 0.75, plot.TOP])


class Merged(unittest.TestCase):
    def test_runs_become_one_unless_they_measured_the_same(self):
        with tempfile.TemporaryDirectory() as folder:
            _, first = compared(folder)
        second = json.loads(json.dumps(first).replace('"some"', '"other"'))
        both = compare.merged([json.loads(json.dumps(first)), second])
        self.assertEqual(len(both["samples"]), 2 * len(first["samples"]))
        self.assertEqual(list(both["models"]), ["some", "other"])
        with self.assertRaisesRegex(SystemExit, "two runs measured"):
            compare.merged([first, json.loads(json.dumps(first))])
        second["machine"] = {"cpu": "another"}
        with self.assertRaisesRegex(SystemExit, "machine"):
            compare.merged([first, second])


class Statistics(unittest.TestCase):
    def samples(self, engine, what, values, conversations=1):
        about = {"model": "m", "threads": 2, "engine": engine, "what": what, "context": 128}
        return [about | {"conversations": conversations, "round": r, "value": v} for r, v in values.items()]

    def test_a_ratio_is_the_median_of_ratios_within_rounds(self):
        # The machine is twice as fast in round 1; within each round the ratios are 2, 3 and 2.5.
        ours, theirs = {0: 20, 1: 60, 2: 25}, {0: 10, 1: 20, 2: 10}
        self.assertEqual(summary.ratios(ours, theirs), {"median": 2.5, "low": 2.0, "high": 3.0, "n": 3})
        self.assertEqual(summary.ratios({0: 1, 1: 5}, {1: 2, 2: 2})["median"], 2.5)
        self.assertIsNone(summary.ratios({0: 1}, {1: 1}))

    def test_the_better_peer_is_the_faster_or_the_sooner(self):
        samples = []
        for engine, rate, wait in (("motet", 9, 1), ("llama.cpp", 3, 4), ("ik_llama.cpp", 6, 8)):
            samples += self.samples(engine, "http", {0: rate}) + self.samples(engine, "time to first token", {0: wait})
        rate, wait = summary.summarise(samples)
        self.assertEqual((rate["better peer"], rate["ratio to better"]["median"]), ("ik_llama.cpp", 1.5))
        self.assertEqual((wait["better peer"], wait["ratio to better"]["median"]), ("llama.cpp", 0.25))

    def test_memory_that_a_conversation_adds(self):
        samples = [s for n, v in ((1, 100), (2, 145), (8, 415)) for s in self.samples("motet", "memory", {0: v}, n)]
        entries = summary.summarise(samples)
        self.assertEqual(summary.added_memory(entries, "m", 2, "motet"), 45)
        self.assertIsNone(summary.added_memory(entries, "m", 2, "llama.cpp"))


class Scale(unittest.TestCase):
    def test_ticks_are_round_and_few(self):
        for greatest, expected in (
            (120, (120, 20)),
            (685, (800, 200)),
            (6, (6, 1)),
            (7, (8, 2)),
            (0.9, (1.0, 0.2)),
            (1000, (1000, 200)),
        ):
            top, step = plot.scale(greatest)
            self.assertAlmostEqual(top, expected[0], msg=greatest)
            self.assertAlmostEqual(step, expected[1], msg=greatest)


if __name__ == "__main__":
    unittest.main()
