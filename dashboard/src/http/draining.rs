//! While the process is stopping it serves on for a moment, so that load balancers and clients notice. Each response asks
//! its client to use another connection, which leads to another process.

use axum::{
    extract::Request,
    http::{HeaderValue, Version, header},
    middleware::Next,
    response::Response,
};
use postrider_dispatcher::health;

pub(crate) async fn close_when_stopping(request: Request, next: Next) -> Response {
    let closes = request.version() <= Version::HTTP_11;
    let mut response = next.run(request).await;
    if closes && health::is_stopping() {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(header::CONNECTION, close);
    }
    response
}
