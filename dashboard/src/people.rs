//! People of the team: made, given a role, given a new password, removed.
//! Invariant: the person that the settings make stays an admin, so that there is always one; and whoever loses a password
//! or is removed loses their sessions with it.

use data_encoding::BASE32HEX_NOPAD;
use postrider_proto::PersonRole;
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{
    Shared,
    audit::{self, Action, Entry},
    auth::{ADMIN_LOGIN, Actor, PasswordError, Session, hash_password, verify_password},
    problem::{Kind, Problem},
    tables::{
        self, people,
        sessions::{self, Holder},
    },
};

const LOGIN_CHARS_MAX: usize = 64;
const PASSWORD_CHARS_MIN: usize = 12;
const PASSWORD_BYTES_MAX: usize = 1024;

/// Answers the password, which is kept nowhere in clear.
pub(crate) async fn add(
    app: &Shared,
    actor: &Actor,
    login: &str,
    role: PersonRole,
) -> Result<String, Problem> {
    if !is_login(login) {
        return Err(Problem::invalid(
            "/login",
            format!("a login is 1 to {LOGIN_CHARS_MAX} of A-Z a-z 0-9 . _ - + @"),
        ));
    }
    let password = new_password();
    let hash = hash(&password).await?;
    let mut transaction = tables::begin(&app.pool).await?;
    if !people::insert(&mut *transaction, login, &hash, role).await? {
        return Err(Problem::conflict(format!("There is a person {login} already.")));
    }
    let detail = json!({"role": role});
    note(
        &mut transaction,
        actor,
        Action::PersonCreated,
        login,
        Some(detail),
    )
    .await?;
    transaction.commit().await?;
    Ok(password)
}

pub(crate) async fn set_role(
    app: &Shared,
    actor: &Actor,
    login: &str,
    role: PersonRole,
) -> Result<(), Problem> {
    check_other(actor, login)?;
    let mut transaction = tables::begin(&app.pool).await?;
    if !people::set_role(&mut *transaction, login, role).await? {
        return Err(Problem::not_found("person"));
    }
    let detail = json!({"role": role});
    note(
        &mut transaction,
        actor,
        Action::PersonChanged,
        login,
        Some(detail),
    )
    .await?;
    transaction.commit().await?;
    Ok(())
}

/// A new password for somebody else, who has lost theirs.
pub(crate) async fn reset_password(app: &Shared, actor: &Actor, login: &str) -> Result<String, Problem> {
    check_other(actor, login)?;
    let password = new_password();
    store_password(app, actor, login, &password).await?;
    Ok(password)
}

/// One's own. Every session ends, this one too: whoever knew the old one is out.
pub(crate) async fn change_password(
    app: &Shared,
    session: &Session,
    current: &str,
    new: &str,
) -> Result<(), Problem> {
    if session.login == ADMIN_LOGIN {
        return Err(Problem::conflict(of_the_settings()));
    }
    if new.chars().count() < PASSWORD_CHARS_MIN || new.len() > PASSWORD_BYTES_MAX {
        return Err(Problem::invalid(
            "/new",
            format!(
                "a password has at least {PASSWORD_CHARS_MIN} characters, and at most {PASSWORD_BYTES_MAX} bytes"
            ),
        ));
    }
    let person = people::find(&app.pool, &session.login)
        .await?
        .ok_or_else(|| Problem::not_found("person"))?;
    if !verify_password(Some(&person.password_hash), current)
        .await
        .map_err(unhashed)?
    {
        return Err(Problem::invalid("/current", "is not your password"));
    }
    store_password(app, &session.actor(), &session.login, new).await
}

pub(crate) async fn remove(app: &Shared, actor: &Actor, login: &str) -> Result<(), Problem> {
    check_other(actor, login)?;
    let mut transaction = tables::begin(&app.pool).await?;
    let person = people::find(&mut *transaction, login)
        .await?
        .ok_or_else(|| Problem::not_found("person"))?;
    sessions::delete_all(&mut *transaction, Holder::Person(person.id)).await?;
    people::delete(&mut *transaction, person.id).await?;
    note(&mut transaction, actor, Action::PersonRemoved, login, None).await?;
    transaction.commit().await?;
    Ok(())
}

async fn store_password(app: &Shared, actor: &Actor, login: &str, password: &str) -> Result<(), Problem> {
    let hash = hash(password).await?;
    let mut transaction = tables::begin(&app.pool).await?;
    let id = people::set_password(&mut *transaction, login, &hash)
        .await?
        .ok_or_else(|| Problem::not_found("person"))?;
    sessions::delete_all(&mut *transaction, Holder::Person(id)).await?;
    note(&mut transaction, actor, Action::PasswordChanged, login, None).await?;
    transaction.commit().await?;
    Ok(())
}

async fn note(
    connection: &mut PgConnection,
    actor: &Actor,
    action: Action,
    login: &str,
    detail: Option<Value>,
) -> Result<(), sqlx::Error> {
    let entry = Entry {
        actor,
        action,
        tenant: None,
        subject: login,
        detail,
    };
    audit::write(connection, entry).await
}

/// Nobody raises or locks out themselves, and the settings' own admin stays as it is.
fn check_other(actor: &Actor, login: &str) -> Result<(), Problem> {
    if login == ADMIN_LOGIN {
        return Err(Problem::conflict(of_the_settings()));
    }
    if actor.0 == format!("person:{login}") {
        return Err(Problem::conflict("Somebody else must do that for you."));
    }
    Ok(())
}

fn of_the_settings() -> String {
    format!(
        "The person {ADMIN_LOGIN} is made by the settings: change POSTRIDER_ADMIN_PASSWORD and start again."
    )
}

fn is_login(text: &str) -> bool {
    (1..=LOGIN_CHARS_MAX).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-+@".contains(&b))
}

/// 100 random bits, in groups that can be read aloud.
fn new_password() -> String {
    let letters = BASE32HEX_NOPAD
        .encode(&rand::random::<[u8; 13]>())
        .to_ascii_lowercase();
    [0, 4, 8, 12, 16].map(|at| &letters[at..at + 4]).join("-")
}

async fn hash(password: &str) -> Result<String, Problem> {
    hash_password(password).await.map_err(unhashed)
}

fn unhashed(error: PasswordError) -> Problem {
    tracing::error!(%error, "a password could not be hashed");
    Problem::new(Kind::Internal, "It has been logged.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_password_is_long_and_readable() {
        let password = new_password();
        assert_eq!(password.len(), 24, "{password}");
        assert_ne!(password, new_password());
    }

    #[test]
    fn logins_are_plain() {
        for good in ["ada", "ada.lovelace+1@example.com", "A"] {
            assert!(is_login(good), "{good}");
        }
        for bad in ["", "a b", "<b>", "ä", "a\0", "a/b", &"a".repeat(65)] {
            assert!(!is_login(bad), "{bad}");
        }
    }

    #[test]
    fn nobody_changes_themselves_or_the_settings_admin() {
        let actor = Actor("person:ada".to_owned());
        assert!(check_other(&actor, "ada").is_err());
        assert!(check_other(&actor, "admin").is_err());
        assert!(check_other(&actor, "grace").is_ok());
    }
}
