-- An endpoint's own CA certificates, client certificate and key, sealed as one value.
alter table postrider.endpoints add column tls bytea;
