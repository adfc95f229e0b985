"""Makes the vocabulary fixtures of motet-text: model files reduced to the metadata a tokenizer needs, compressed.

    pip install gguf
    python tools/vocabularies.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2 gemma-3-270m-q4_k_m.gguf gemma3

writes crates/motet-text/tests/fixtures/tokenizer/{smollm2,gemma3}.gguf.xz.
"""

import io
import lzma
import pathlib
import struct
import sys

import gguf

OUT = pathlib.Path(__file__).parent.parent / "crates/motet-text/tests/fixtures/tokenizer"


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack(kind: gguf.GGUFValueType, value) -> bytes:
    if kind == gguf.GGUFValueType.STRING:
        return string(value)
    form = {"UINT32": "<I", "INT32": "<i", "FLOAT32": "<f", "BOOL": "<?", "UINT64": "<Q"}[kind.name]
    return struct.pack(form, value)


def reduced(path: str) -> bytes:
    """GGUF version 3 without tensors: `general.architecture` and all of `tokenizer.*`."""
    fields = gguf.GGUFReader(path).fields
    keys = [key for key in fields if key == "general.architecture" or key.startswith("tokenizer.")]
    out = io.BytesIO()
    out.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)))
    for key in keys:
        types, value = fields[key].types, fields[key].contents()
        out.write(string(key) + struct.pack("<I", types[0]))
        if types[0] == gguf.GGUFValueType.ARRAY:
            out.write(struct.pack("<IQ", types[1], len(value)))
            for item in value:
                out.write(pack(types[1], item))
        else:
            out.write(pack(types[0], value))
    return out.getvalue()


def main() -> None:
    arguments = sys.argv[1:]
    for path, name in zip(arguments[::2], arguments[1::2], strict=True):
        data = reduced(path)
        target = OUT / f"{name}.gguf.xz"
        target.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
        print(target, len(data), "->", target.stat().st_size)


if __name__ == "__main__":
    main()
