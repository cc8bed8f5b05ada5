//! A new migration is part of the program: without this a build would not notice it.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
