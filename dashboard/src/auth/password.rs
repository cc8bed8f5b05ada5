//! Passwords of people: argon2id, hashed away from the async threads and a few at a time.

use argon2::{Argon2, PasswordHasher, PasswordVerifier, password_hash::phc::PasswordHash};
use sqlx::PgConnection;
use tokio::sync::Semaphore;

use crate::tables::people;

/// Each hash takes 19 MiB and some 20 ms of a core: more at once would let a crowd at the door take the machine.
static HASHES: Semaphore = Semaphore::const_new(2);

const PASSWORD_BYTES_MAX: usize = 1024;

/// The person that the settings make: always there, always an admin.
pub(crate) const ADMIN_LOGIN: &str = "admin";

#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    #[error("a password is 1 to {PASSWORD_BYTES_MAX} bytes")]
    Length,
    #[error("the password could not be hashed")]
    Hash,
    #[error("the database did not answer: {0}")]
    Database(#[from] sqlx::Error),
}

/// Makes the person `admin`, or gives them this password.
pub async fn set_admin_password(db: &mut PgConnection, password: &str) -> Result<(), PasswordError> {
    // The same password at every start must not end the sessions and write a row each time.
    if let Some(person) = people::find(&mut *db, ADMIN_LOGIN).await?
        && verify(Some(&person.password_hash), password).await?
    {
        return Ok(());
    }
    let hash = hash(password).await?;
    people::put_admin(db, ADMIN_LOGIN, &hash).await?;
    Ok(())
}

pub(crate) async fn hash(password: &str) -> Result<String, PasswordError> {
    if password.is_empty() || password.len() > PASSWORD_BYTES_MAX {
        return Err(PasswordError::Length);
    }
    let password = password.to_owned();
    apart(move || {
        let hash: PasswordHash = Argon2::default()
            .hash_password(password.as_bytes())
            .map_err(|_| PasswordError::Hash)?;
        Ok(hash.to_string())
    })
    .await
}

/// Takes as long when there is no such person, so that the time does not tell who exists.
pub(crate) async fn verify(hash: Option<&str>, password: &str) -> Result<bool, PasswordError> {
    if password.len() > PASSWORD_BYTES_MAX {
        return Ok(false);
    }
    let Some(hash) = hash.map(str::to_owned) else {
        let _ = self::hash(if password.is_empty() { "-" } else { password }).await?;
        return Ok(false);
    };
    let password = password.to_owned();
    apart(move || {
        let parsed = PasswordHash::new(&hash).map_err(|_| PasswordError::Hash)?;
        Ok(Argon2::default()
            .verify_password(password.as_bytes(), &parsed)
            .is_ok())
    })
    .await
}

async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PasswordError> + Send + 'static,
) -> Result<T, PasswordError> {
    let _permit = HASHES.acquire().await.map_err(|_| PasswordError::Hash)?;
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| PasswordError::Hash)?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_right_password_verifies() {
        let hash = hash("correct horse").await.expect("a hash");
        assert!(hash.starts_with("$argon2id$"));
        assert!(verify(Some(&hash), "correct horse").await.expect("a verdict"));
        assert!(!verify(Some(&hash), "wrong").await.expect("a verdict"));
        assert!(!verify(None, "correct horse").await.expect("a verdict"));
        assert!(matches!(super::hash("").await, Err(PasswordError::Length)));
    }
}
