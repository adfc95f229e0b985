"""Outputs of the programs, recorded from llama.cpp b11434 and motet on SmolLM2 135M Q4_1, read as a person reads them."""

import json
import unittest
from pathlib import Path

import machine
from engines import Failed, Work, batched_rate, bench_rate, complaint, motet_rate, output

SAMPLES = Path(__file__).parent / "samples"


def sample(name):
    return (SAMPLES / name).read_text()


class Outputs(unittest.TestCase):
    def test_llama_bench(self):
        self.assertEqual(bench_rate(sample("llama-bench.json"), Work(1, 512, 0)), 142.070324)
        with self.assertRaises(Failed):
            bench_rate(sample("llama-bench.json"), Work(1, 128, 0))

    def test_llama_batched_bench(self):
        lines = sample("llama-batched-bench.jsonl")
        self.assertEqual(batched_rate(lines, Work(1, 128, 16)), 35.643715)
        self.assertEqual(batched_rate(lines, Work(2, 128, 16)), 55.548420)
        # What does not fit into its memory is passed over in silence.
        with self.assertRaisesRegex(Failed, "pl 4"):
            batched_rate(lines, Work(4, 128, 16))

    def test_motet_bench(self):
        report = sample("motet-bench.json")
        self.assertAlmostEqual(motet_rate(report, Work(1, 512, 0)), 789.7589891)
        self.assertAlmostEqual(motet_rate(report, Work(2, 128, 16)), 147.7340625659)
        with self.assertRaises(Failed):
            motet_rate(report, Work(8, 128, 16))

    def test_a_program_that_fails_says_why(self):
        script = "echo loading >&2; echo 'x.h:7: GGML_ASSERT(S > 0) failed' >&2; echo trace >&2; kill -ABRT $$"
        with self.assertRaisesRegex(Failed, r"signal 6: x\.h:7: GGML_ASSERT\(S > 0\) failed$"):
            output(["sh", "-c", script])
        with self.assertRaises(Failed):
            output(["/no/such/program"])
        self.assertEqual(complaint("one\ntwo three"), "one two three")


class Demand(unittest.TestCase):
    def test_smollm2(self):
        demand = machine.demand(json.loads(sample("motet-program.json")))
        # llama-bench's model_size: the head is the embedding, so every tensor is read once.
        self.assertEqual(demand["step_bytes"], json.loads(sample("llama-bench.json"))[0]["model_size"])
        # Per layer: q and o 576 x 576, k and v 576 x 192, gate, up and down 576 x 1536.
        layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
        self.assertEqual(demand["prompt_multiply_adds"], 30 * layer)


if __name__ == "__main__":
    unittest.main()
