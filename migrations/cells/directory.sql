-- What every cell has a copy of. Columns that are not listed are each database's own. Run by `postrider cells add`, on the home
-- database: only there is a publication needed, and column lists need Postgres 15.
alter publication postrider_directory set table
    postrider.cells (id, name, state, created_at),
    postrider.tenants (id, slug, name, created_at, deleted_at, rotate_every_days, retention_days, all_operational_events,
                       paused_at, paused_by, pause_reason, emits_per_minute, stored_bytes_max, cell_id, moving),
    postrider.event_types (id, name, description, matches, thin, created_at, deleted_at),
    postrider.schemas (id, type_id, version, schema, created_at),
    postrider.api_keys (id, public_id, hash, role, tenant_id, name, created_at, revoked_at, prefix, expires_at),
    postrider.people (id, login, password_hash, created_at, role)
