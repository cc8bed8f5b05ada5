//! Compiles the gRPC description, in Rust alone: no `protoc` is needed on the machine.

use std::{error::Error, fs, path::PathBuf};

use prost::Message;

const ROOT: &str = "../proto";
const FILE: &str = "postrider/v1/emit.proto";

#[expect(
    clippy::disallowed_methods,
    reason = "cargo passes its settings by the environment"
)]
fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={ROOT}/{FILE}");
    let described = protox::compile([FILE], [ROOT])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    // For reflection.
    fs::write(out.join("postrider.bin"), described.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::grpc::codec::ProblemCodec")
        .compile_fds(described)?;
    Ok(())
}
