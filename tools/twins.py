"""F16 and Q8_0 twins of an F32 GGUF file: same metadata, same tensors, matrices converted.

What stays F32: vectors, convolution kernels, expert routers, and rows that are no multiple of 32.

    python twins.py SOURCE-f32.gguf f16|q8_0 TARGET.gguf
"""

import hashlib
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

TYPES = {"f16": Type.F16, "q8_0": Type.Q8_0}


def stays_f32(name, shape):
    """`shape` as numpy sees it."""
    return len(shape) == 1 or "conv1d" in name or "ffn_gate_inp" in name or shape[-1] % 32 != 0


def twin_tensors(reader, kind):
    """(name, type, data) of every tensor of the twin, in file order. Q8_0 data is bytes."""
    for tensor in reader.tensors:
        values = tensor.data.reshape([int(n) for n in reversed(tensor.shape)])
        target = Type.F32 if stays_f32(tensor.name, values.shape) else TYPES[kind]
        yield tensor.name, target, gguf.quantize(values, target)


def copy_metadata(reader, writer):
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, element)


def write_twin(source, kind, target):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    copy_metadata(reader, writer)
    for name, tensor_type, data in twin_tensors(reader, kind):
        writer.add_tensor(name, data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def data_hash(path):
    """SHA-256 over the bytes of all tensors in file order, without padding: the weights, whoever wrote the file."""
    digest = hashlib.sha256()
    for tensor in gguf.GGUFReader(path).tensors:
        digest.update(np.ascontiguousarray(tensor.data).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[2] not in TYPES:
        sys.exit(__doc__)
    write_twin(*sys.argv[1:])
