//! Outbound HTTP: one client for every request to a receiver, and the rules about where it may connect.

pub mod client;
pub mod guard;
pub mod headers;
pub mod proxy;
pub mod tls;
