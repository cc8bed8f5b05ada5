//! Passwords: argon2id, hashed off the async threads, one at a time for each of two kinds of callers.
//! Invariant: unauthenticated clients use at most one core, take turns by address, and never delay the team.

use std::{
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, LazyLock},
};

use argon2::{Argon2, PasswordHasher, PasswordVerifier, password_hash::phc::PasswordHash};
use sha2::{Digest, Sha256};
use sqlx::PgConnection;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::address::network;
use crate::{
    http::slots::{Slot, Slots},
    tables::people,
};

/// Each hash takes 19 MiB and about 20 ms of a core: more in parallel would let sign-in attempts exhaust the machine.
static TEAM: Semaphore = Semaphore::const_new(1);
static SIGN_INS: LazyLock<SignInQueue> = LazyLock::new(SignInQueue::new);

/// Sign-ins waiting for their turn.
const WAITING_MAX: usize = 1_024;
/// Per address: they finish within seconds, well before the request timeout.
const WAITING_PER_ADDRESS_MAX: usize = 256;
const QUEUES: usize = 256;

const PASSWORD_BYTES_MAX: usize = 1024;

/// The account managed by the settings: always present, always an admin.
pub(crate) const ADMIN_LOGIN: &str = "admin";

#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    #[error("a password must be 1 to {PASSWORD_BYTES_MAX} bytes")]
    Length,
    #[error("could not hash the password")]
    Hash,
    #[error("database error: {0}")]
    Database(#[from] sqlx::Error),
}

/// Creates the person `admin`, or sets their password.
pub async fn set_admin_password(db: &mut PgConnection, password: &str) -> Result<(), PasswordError> {
    // An unchanged password at a restart must not end sessions or write an audit row.
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
    apart(team().await?, move || make(&password)).await
}

/// For a signed-in person, or at startup.
pub(crate) async fn verify(hash: Option<&str>, password: &str) -> Result<bool, PasswordError> {
    let (hash, password) = (hash.map(str::to_owned), password.to_owned());
    apart(team().await?, move || compare(hash.as_deref(), &password)).await
}

async fn team() -> Result<SemaphorePermit<'static>, PasswordError> {
    TEAM.acquire().await.map_err(|_| PasswordError::Hash)
}

fn make(password: &str) -> Result<String, PasswordError> {
    let hash: PasswordHash = Argon2::default()
        .hash_password(password.as_bytes())
        .map_err(|_| PasswordError::Hash)?;
    Ok(hash.to_string())
}

/// Takes the same time for an unknown login, so that timing does not reveal who exists.
fn compare(hash: Option<&str>, password: &str) -> Result<bool, PasswordError> {
    if password.len() > PASSWORD_BYTES_MAX {
        return Ok(false);
    }
    let Some(hash) = hash else {
        make(if password.is_empty() { "-" } else { password })?;
        return Ok(false);
    };
    let parsed = PasswordHash::new(hash).map_err(|_| PasswordError::Hash)?;
    Ok(Argon2::default()
        .verify_password(password.as_bytes(), &parsed)
        .is_ok())
}

/// `turn` is released when the work is done, even if the caller is gone.
async fn apart<T: Send + 'static>(
    turn: impl Send + 'static,
    work: impl FnOnce() -> Result<T, PasswordError> + Send + 'static,
) -> Result<T, PasswordError> {
    let work = move || {
        let _turn = turn;
        work()
    };
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| PasswordError::Hash)?
}

/// The sign-in queue. Each address waits in a queue and queues take turns, so that many attempts from one address do
/// not delay another.
struct SignInQueue {
    waiting: Arc<Slots<Ipv6Addr>>,
    salt: [u8; 32],
    queues: Vec<Semaphore>,
    hash: Semaphore,
}

/// A slot in the queue, good for one hash.
pub(super) struct QueueSlot {
    address: Ipv6Addr,
    _slot: Slot<Ipv6Addr>,
}

/// None if too many are waiting.
pub(super) fn queue(address: Option<IpAddr>) -> Option<QueueSlot> {
    let address = address.map_or(Ipv6Addr::UNSPECIFIED, network);
    let slot = SIGN_INS.waiting.take(Some(address))?;
    Some(QueueSlot { address, _slot: slot })
}

impl SignInQueue {
    fn new() -> Self {
        Self {
            waiting: Slots::new(WAITING_MAX, WAITING_PER_ADDRESS_MAX),
            salt: rand::random(),
            queues: (0..QUEUES).map(|_| Semaphore::new(1)).collect(),
            hash: Semaphore::new(1),
        }
    }

    fn queue(&self, address: Ipv6Addr) -> &Semaphore {
        let hash = Sha256::new()
            .chain_update(self.salt)
            .chain_update(address.octets())
            .finalize();
        &self.queues[usize::from(hash[0]) % QUEUES]
    }
}

impl QueueSlot {
    /// For somebody who is not signed in yet.
    pub(super) async fn verify(self, hash: Option<&str>, password: &str) -> Result<bool, PasswordError> {
        let acquire = |semaphore: &'static Semaphore| async {
            semaphore.acquire().await.map_err(|_| PasswordError::Hash)
        };
        let queue = acquire(SIGN_INS.queue(self.address)).await?;
        let turn = acquire(&SIGN_INS.hash).await?;
        let (hash, password) = (hash.map(str::to_owned), password.to_owned());
        apart((turn, queue, self), move || compare(hash.as_deref(), &password)).await
    }
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
        let slot = || queue(None).expect("a slot");
        assert!(
            slot()
                .verify(Some(&hash), "correct horse")
                .await
                .expect("a verdict")
        );
        assert!(!slot().verify(None, "correct horse").await.expect("a verdict"));
    }

    #[tokio::test]
    async fn many_tries_from_one_address_are_not_before_one_from_another() {
        let address = |n: u8| IpAddr::from([192, 0, 2, n]);
        let queue_of = |n: u8| std::ptr::from_ref(SIGN_INS.queue(network(address(n))));
        let other = (2..=255)
            .find(|n| queue_of(*n) != queue_of(1))
            .expect("another queue");
        let tries = |n: u8, count: usize| {
            let mut running = tokio::task::JoinSet::new();
            for _ in 0..count {
                let slot = queue(Some(address(n))).expect("a slot");
                running.spawn(slot.verify(None, "a guess"));
            }
            running
        };
        let mut crowd = tries(1, 100);
        tokio::task::yield_now().await;
        tries(other, 1)
            .join_next()
            .await
            .expect("one")
            .expect("done")
            .expect("a verdict");
        let mut done = 0;
        while crowd.try_join_next().is_some() {
            done += 1;
        }
        assert!(done < 50, "{done} of the crowd went before it");
    }
}
