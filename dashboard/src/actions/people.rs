//! Team members: add, change role, reset password, remove.
//! Invariant: the account managed by the settings stays an admin, so that there is always one; a person whose
//! password is changed or who is removed loses all sessions.

use data_encoding::BASE32HEX_NOPAD;
use postrider_proto::PersonRole;
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{
    Shared,
    auth::{ADMIN_LOGIN, Actor, PasswordError, Session, hash_password, verify_password},
    http::problem::Problem,
    tables::{
        self,
        audit::{self, Action, Entry, changes},
        people,
        sessions::{self, Holder},
    },
};

const LOGIN_CHARS_MAX: usize = 64;
const PASSWORD_CHARS_MIN: usize = 12;
const PASSWORD_BYTES_MAX: usize = 1024;

/// Returns the password, which is not stored in clear text.
pub(crate) async fn add(
    app: &Shared,
    actor: &Actor,
    login: &str,
    role: PersonRole,
) -> Result<String, Problem> {
    if !is_login(login) {
        return Err(Problem::invalid(
            "/login",
            format!("must be 1 to {LOGIN_CHARS_MAX} characters of A-Z a-z 0-9 . _ - + @"),
        ));
    }
    let password = new_password();
    let hash = hash(&password).await?;
    let mut transaction = tables::begin(&app.pool).await?;
    if !people::insert(&mut *transaction, login, &hash, role).await? {
        return Err(Problem::conflict(format!(
            "A person with the login {login} already exists."
        )));
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
    let before = people::find(&mut *transaction, login)
        .await?
        .ok_or_else(|| Problem::not_found("person"))?;
    if !people::set_role(&mut *transaction, login, role).await? {
        return Err(Problem::not_found("person"));
    }
    let changed = changes([("role", json!(before.role))], [("role", json!(role))]);
    let entry = Entry::new(actor, Action::PersonChanged, None, login)
        .with(json!({"role": role}))
        .changed(&changed);
    audit::write(&mut transaction, entry).await?;
    transaction.commit().await?;
    Ok(())
}

/// Sets a new password for another person who has lost theirs.
pub(crate) async fn reset_password(app: &Shared, actor: &Actor, login: &str) -> Result<String, Problem> {
    check_other(actor, login)?;
    let password = new_password();
    store_password(app, actor, login, &password).await?;
    Ok(password)
}

/// Changes one's own password. Ends every session, this one included: anyone who knew the old one is signed out.
pub(crate) async fn change_password(
    app: &Shared,
    actor: &Actor,
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
                "must have at least {PASSWORD_CHARS_MIN} characters and at most {PASSWORD_BYTES_MAX} bytes"
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
        return Err(Problem::invalid("/current", "Current password is incorrect."));
    }
    store_password(app, actor, &session.login, new).await
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
) -> sqlx::Result<()> {
    let entry = Entry::new(actor, action, None, login).with(detail);
    audit::write(connection, entry).await
}

/// Nobody can change their own role or remove themselves, and the settings' admin stays as it is.
fn check_other(actor: &Actor, login: &str) -> Result<(), Problem> {
    if login == ADMIN_LOGIN {
        return Err(Problem::conflict(of_the_settings()));
    }
    if actor.name == format!("person:{login}") {
        return Err(Problem::conflict(
            "You can't do this to your own account. Ask another admin.",
        ));
    }
    Ok(())
}

fn of_the_settings() -> String {
    format!(
        "The account {ADMIN_LOGIN} is managed by server settings. Change POSTRIDER_ADMIN_PASSWORD and restart."
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
    Problem::internal("could not hash a password", error)
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
        let actor = Actor::new("person:ada");
        assert!(check_other(&actor, "ada").is_err());
        assert!(check_other(&actor, "admin").is_err());
        assert!(check_other(&actor, "grace").is_ok());
    }
}
