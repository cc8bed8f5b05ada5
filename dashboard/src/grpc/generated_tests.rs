//! Keeps the code in `generated/` equal to what `proto/postrider/v1/emit.proto` says. It is committed, because the compilers
//! of the description would otherwise be part of every build.

use std::{error::Error, fs, path::Path};

use prost::Message;

const DESCRIPTIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../proto");
const GENERATED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/grpc/generated");
const FILES: [&str; 2] = ["postrider.v1.rs", "postrider.v1.bin"];

fn generate(folder: &Path) -> Result<(), Box<dyn Error>> {
    let described = protox::compile(["postrider/v1/emit.proto"], [DESCRIPTIONS])?;
    fs::write(folder.join("postrider.v1.bin"), described.encode_to_vec())?;
    tonic_prost_build::configure()
        .build_transport(false)
        .codec_path("crate::grpc::codec::ProblemCodec")
        .out_dir(folder)
        .compile_fds(described)?;
    Ok(())
}

#[test]
fn generated_code_is_up_to_date() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    generate(folder.path())?;
    let mut changed = Vec::new();
    for name in FILES {
        let (fresh, committed) = (
            fs::read(folder.path().join(name))?,
            Path::new(GENERATED).join(name),
        );
        if fs::read(&committed).ok().as_ref() != Some(&fresh) {
            fs::write(&committed, fresh)?;
            changed.push(name);
        }
    }
    assert!(
        changed.is_empty(),
        "{changed:?} did not match emit.proto and were written again: commit them"
    );
    Ok(())
}
