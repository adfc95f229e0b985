//! Writes a small file with every type of metadata, for `tools/quant_vectors.py --check` to read with Python.

use motet_gguf::{Format, GgufError, Value, ValueType, Writer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: write_small FILE")?;
    std::fs::write(path, small_file()?.to_bytes())?;
    Ok(())
}

fn small_file() -> Result<Writer<'static>, GgufError> {
    let mut file = Writer::new();
    file.put("general.architecture", Value::String("llama"))?;
    file.put("general.alignment", Value::U32(64))?;
    file.put("test.u8", Value::U8(8))?;
    file.put("test.i8", Value::I8(-8))?;
    file.put("test.u16", Value::U16(16))?;
    file.put("test.i16", Value::I16(-16))?;
    file.put("test.u32", Value::U32(32))?;
    file.put("test.i32", Value::I32(-32))?;
    file.put("test.u64", Value::U64(1 << 40))?;
    file.put("test.i64", Value::I64(-(1 << 40)))?;
    file.put("test.f32", Value::F32(0.5))?;
    file.put("test.f64", Value::F64(-0.25))?;
    file.put("test.bool", Value::Bool(true))?;
    file.put_strings("test.strings", ["", "é", "a\nb"])?;
    file.put_array("test.numbers", ValueType::I32, [-1, 0, 1].map(Value::I32))?;
    file.put_array("test.flags", ValueType::Bool, [true, false].map(Value::Bool))?;

    let ramp: Vec<f32> = (0..64).map(|i| i as f32 - 20.0).collect();
    for (name, format) in [("ramp.f32", Format::F32), ("ramp.f16", Format::F16), ("ramp.q8_0", Format::Q8_0)]
    {
        let mut bytes = Vec::new();
        format.quantize(&ramp, &mut bytes)?;
        file.tensor(name, &[32, 2], format, bytes)?;
    }
    Ok(file)
}
