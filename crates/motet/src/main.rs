//! motet
fn main() {}
