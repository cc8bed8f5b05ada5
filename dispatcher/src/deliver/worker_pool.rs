//! Reusable attempt tasks. A task uses several kilobytes: allocating and freeing one per attempt cost more than
//! signing the body.

use std::sync::Mutex;

use tokio::sync::oneshot;

use crate::lock::lock;

/// Idle tasks beyond this number end.
const WAITING_MAX: usize = 512;

/// Idle tasks; `None` once the pool is closed.
pub(crate) struct WorkerPool<W>(Mutex<Option<Vec<oneshot::Sender<W>>>>);

impl<W> WorkerPool<W> {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Some(Vec::new())))
    }

    /// Hands work to the task that became idle last. Returns the work when none is idle.
    pub(crate) fn offer(&self, mut work: W) -> Result<(), W> {
        loop {
            let Some(task) = lock(&self.0).as_mut().and_then(Vec::pop) else {
                return Err(work);
            };
            match task.send(work) {
                Ok(()) => return Ok(()),
                Err(back) => work = back,
            }
        }
    }

    /// The next work for the calling task, or `None` when it should end.
    pub(crate) async fn next(&self) -> Option<W> {
        let (task, work) = oneshot::channel();
        match lock(&self.0).as_mut() {
            Some(waiting) if waiting.len() < WAITING_MAX => waiting.push(task),
            _ => return None,
        }
        work.await.ok()
    }

    /// Ends idle tasks now, and busy ones when they are done.
    pub(crate) fn close(&self) {
        *lock(&self.0) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test]
    async fn work_goes_to_a_task_that_waits_and_closing_ends_them_all() {
        let workers = Arc::new(WorkerPool::new());
        assert_eq!(workers.offer(1), Err(1), "nobody waits");
        let task = tokio::spawn({
            let workers = workers.clone();
            async move {
                let mut done = Vec::new();
                while let Some(work) = workers.next().await {
                    done.push(work);
                }
                done
            }
        });
        for work in [2, 3] {
            let mut offered = workers.offer(work);
            while let Err(back) = offered {
                tokio::task::yield_now().await;
                offered = workers.offer(back);
            }
        }
        workers.close();
        assert_eq!(task.await.expect("no panic"), [2, 3]);
        assert_eq!(workers.offer(4), Err(4));
        assert_eq!(workers.next().await, None);
    }

    #[tokio::test]
    async fn a_task_that_was_ended_gets_nothing_and_the_work_is_not_lost() {
        let workers = WorkerPool::new();
        let waits = tokio::time::timeout(std::time::Duration::ZERO, workers.next()).await;
        assert!(waits.is_err());
        assert_eq!(workers.offer(1), Err(1));
    }
}
