//! Public limits. Each has one name, used by the code, the messages and the API document. Ranges of endpoint settings
//! are beside the settings, in `api::endpoints`.

pub const EVENT_DATA_BYTES_MAX: usize = 256 * 1024;
pub const EVENT_ID_CHARS_MAX: usize = 128;
pub const EVENT_TYPE_BYTES_MAX: usize = 128;
pub const ORDERING_KEY_BYTES_MAX: usize = 255;
pub const JSON_DEPTH_MAX: usize = 128;
pub const BATCH_EVENTS_MAX: usize = 1_000;
pub const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
pub const ENDPOINTS_PER_TENANT_MAX: i64 = 500;
pub const TYPES_PER_ENDPOINT_MAX: usize = 100;
pub const CUSTOM_HEADERS_MAX: usize = 20;
pub const CUSTOM_HEADER_BYTES_MAX: usize = 1024;
/// Each of an endpoint's CA certificates, its client certificate with its chain, and its key.
pub const TLS_PEM_BYTES_MAX: usize = 16 * 1024;
pub const TLS_CERTIFICATES_MAX: usize = 10;
pub const URL_BYTES_MAX: usize = 2048;
pub const DESCRIPTION_BYTES_MAX: usize = 1024;
pub const LIST_PAGE_MAX: i64 = 1_000;
pub const LIST_PAGE_DEFAULT: i64 = 50;
pub const RESPONSE_READ_BYTES_MAX: usize = 64 * 1024;
/// Of a longer body one more byte is stored: it says that the body was cut.
pub const RESPONSE_KEPT_BYTES_MAX: usize = 4 * 1024;
pub const RETRY_AFTER_SECONDS_MAX: u64 = 24 * 60 * 60;
pub const SCHEDULE_STEPS_MAX: usize = 50;
/// Scheduled attempts and replays together. The columns that count them hold 32,767.
pub const ATTEMPTS_PER_DELIVERY_MAX: u16 = 1_000;
/// Bulk replays that have not finished.
pub const REPLAYS_RUNNING_PER_TENANT_MAX: i64 = 100;
/// Deliveries per second and endpoint that a bulk replay may be set to.
pub const REPLAY_RATE_MAX: i32 = 100_000;
/// Dead letters that one request discards.
pub const DISCARDED_MAX: i64 = 5_000;
/// Of an automatic rotation policy. The old secret signs for three days, and a rotation is announced three days
/// ahead.
pub const ROTATE_DAYS_MIN: i64 = 7;
pub const ROTATE_DAYS_MAX: i64 = 730;
/// The threshold of a dead letter alert.
pub const ALERT_DEAD_LETTERS_MAX: i64 = 1_000_000_000;
pub const SECRET_BYTES_MAX: usize = 256;
pub const OVERLAP_SECONDS_MAX: i32 = 7 * 24 * 60 * 60;
pub const VERSIONS_PER_TYPE_MAX: usize = 100;
pub const KEY_NAME_BYTES_MAX: usize = 128;
pub const IDEMPOTENCY_KEY_CHARS_MAX: usize = 255;
pub const SHARDS: i16 = 64;

/// Quotas of a tenant.
pub const EMITS_PER_MINUTE_MAX: i64 = 1_000_000_000;
pub const STORED_BYTES_MAX: i64 = 1_000_000_000_000_000;
