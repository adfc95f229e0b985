"""Test vectors of every tensor format, from the PyPI package `gguf`: one GGUF file of pairs.

For each format F a tensor `F` of stored blocks and a tensor `F.values` with what `gguf.dequantize` makes of them;
further `source`, and for each format that can be made `source.F` with what `gguf.quantize` makes of it.

    python quant_vectors.py ../crates/motet-gguf/tests/fixtures/quants.gguf

The other way round, `--check FILE` reads a file that motet wrote (`cargo run -p motet-gguf --example write_small FILE`)
with `gguf.GGUFReader` and compares it with what the example says is in it.
"""

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Where the f16 scales and minima of a block lie.
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.MXFP4: [],
}  # fmt: skip
FLOATS = {Type.F32: (np.uint32, np.float32), Type.F16: (np.uint16, np.float16), Type.BF16: (np.uint16, None)}
MADE = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
# Zeros, the largest, the smallest normal and denormal halves, and ordinary ones.
EXTREME_SCALES = np.array([0.0, -0.0, 65504, -65504, 2**-14, 2**-24, -(2**-24), 3 * 2**-20, 1, -0.01], np.float16)
ROW, ROWS = 256, 20


def random_blocks(rng, kind):
    """Rows of 256 elements: random bytes; the first blocks run through the extreme scales with quants all zeros, all
    ones and random; the other scales are ordinary numbers."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * ROW // length, size), dtype=np.uint8)
    count = len(blocks)
    blocks[0 : count // 4 : 4], blocks[1 : count // 4 : 4] = 0, 255
    for at in SCALES[kind]:
        scales = rng.normal(0, 0.05, count).astype(np.float16)
        extremes = rng.permutation(np.resize(EXTREME_SCALES, count // 2))
        scales[: count // 2] = extremes
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks.reshape(ROWS, -1)


def random_floats(rng, kind):
    """Every bit pattern is as likely as another, but no NaN: its payload is nobody's business."""
    bits_type, float_type = FLOATS[kind]
    bits = rng.integers(0, np.iinfo(bits_type).max, (ROWS, ROW), dtype=bits_type, endpoint=True)
    values = (bits.astype(np.uint32) << 16).view(np.float32) if float_type is None else bits.view(float_type)
    bits[np.isnan(values)] = 0
    return bits if float_type is None else bits.view(float_type)


def source_values(rng):
    """What is quantised: ordinary rows, and rows of zeros, constants, ties, both signs of one magnitude, far scales."""
    x = rng.normal(0, 1, (16, ROW)).astype(np.float32)
    x[1] = 0
    x[2] = -0.0
    x[3], x[4] = 0.75, -0.75
    x[5] = np.arange(ROW) % 255 - 127  # d is 1 for blocks that hold ±127
    x[6] = np.where(np.arange(ROW) % 32 == 0, 127, np.arange(ROW) % 32 + 0.5)  # halves: ties of Q8_0
    x[7] = np.where(np.arange(ROW) % 2 == 0, 3, -3)
    x[8] = -x[7]
    x[9] *= 1e4
    x[10] *= 1e-30
    x[11] = np.abs(x[11])
    x[12] = -np.abs(x[12])
    x[13] = np.where(np.arange(ROW) % 32 == 5, 8, 0.25)  # one large value
    x[14] *= np.exp2(rng.integers(-20, 10, ROW)).astype(np.float32)
    return x


def write(path):
    rng = np.random.default_rng(20240)
    writer = gguf.GGUFWriter(path, "none")
    for kind in [*FLOATS, *SCALES]:
        stored = random_floats(rng, kind) if kind in FLOATS else random_blocks(rng, kind)
        raw = stored.view(np.uint8)
        with np.errstate(over="ignore"):
            values = gguf.dequantize(raw if kind == Type.BF16 else stored, kind).reshape(ROWS, ROW)
        assert values.dtype == np.float32 and not np.isnan(values).any(), kind
        writer.add_tensor(kind.name, raw, raw_dtype=kind)
        writer.add_tensor(kind.name + ".values", values)
    source = source_values(rng)
    writer.add_tensor("source", source)
    for kind in MADE:
        with np.errstate(over="ignore"):
            made = gguf.quantize(source, kind)
        writer.add_tensor(f"source.{kind.name}", np.ascontiguousarray(made).view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(path):
    """The keys and tensors of `examples/write_small.rs`, as Python reads them."""
    reader = gguf.GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    expected = {
        "general.architecture": "llama", "general.alignment": 64,
        "test.u8": 8, "test.i8": -8, "test.u16": 16, "test.i16": -16, "test.u32": 32, "test.i32": -32,
        "test.u64": 2**40, "test.i64": -(2**40), "test.f32": 0.5, "test.f64": -0.25, "test.bool": True,
        "test.strings": ["", "é", "a\nb"], "test.numbers": [-1, 0, 1], "test.flags": [True, False],
    }  # fmt: skip
    assert values == expected, values
    ramp = np.arange(64, dtype=np.float32).reshape(2, 32) - 20
    for name, kind in [("ramp.f32", Type.F32), ("ramp.f16", Type.F16), ("ramp.q8_0", Type.Q8_0)]:
        tensor = next(t for t in reader.tensors if t.name == name)
        assert tensor.tensor_type == kind and list(tensor.shape) == [32, 2], tensor
        assert np.array_equal(tensor.data, gguf.quantize(ramp, kind)), name
    print(f"{path}: {len(values)} keys and {len(reader.tensors)} tensors are as expected")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--check", path]:
            check(path)
        case [path] if not path.startswith("-"):
            write(path)
        case _:
            sys.exit(__doc__)
