//! Transactions: evaluate compares, check, apply.
//!
//! All compares, including nested ones, are evaluated first, against the state before the transaction. Then every
//! operation of the chosen branches is checked against that same state, as in etcd first every put and then every
//! range: a transaction with several errors fails with the same one. Only then is anything written, and from there on
//! nothing can fail. Operations see the writes of earlier operations.

use std::cmp::Ordering;

use crate::error::Error;
use crate::range::KeyRange;
use crate::reply::{TxnOpReply, TxnReply};
use crate::request::{Compare, CompareResult, CompareTarget, TxnOp, TxnRequest};
use crate::space::Space;
use crate::space::log::Change;

use super::{State, range};

/// The chosen branch of the transaction, and of each nested transaction in it, in order.
struct Decision {
    succeeded: bool,
    nested: Vec<Decision>,
}

impl State {
    /// Runs a transaction whose [`TxnRequest::check`] has passed.
    pub(super) fn txn(&mut self, txn: TxnRequest) -> Result<TxnReply, Error> {
        let id = txn.space()?;
        let decision = decide(self.space(id), &txn);
        self.check_puts(&txn, &decision)?;
        check_ranges(self.space(id), &txn, &decision)?;
        let mut reply = self.run_branch(txn, &decision);
        reply.revision = self.space(id).view_revision();
        Ok(reply)
    }

    pub(super) fn run_read_txn(&self, txn: &TxnRequest) -> Result<TxnReply, Error> {
        let space = self.space(txn.space()?);
        let decision = decide(space, txn);
        check_ranges(space, txn, &decision)?;
        let mut reply = read_branch(space, txn, &decision)?;
        reply.revision = space.revision();
        Ok(reply)
    }

    fn check_puts(&self, txn: &TxnRequest, decision: &Decision) -> Result<(), Error> {
        let mut nested = decision.nested.iter();
        for op in branch(txn, decision) {
            match op {
                TxnOp::Put(put) => self.check_put(put)?,
                TxnOp::Range(_) | TxnOp::Delete(_) => {}
                TxnOp::Txn(inner) => self.check_puts(inner, next(&mut nested))?,
            }
        }
        Ok(())
    }

    fn run_branch(&mut self, txn: TxnRequest, decision: &Decision) -> TxnReply {
        let ops = if decision.succeeded { txn.success } else { txn.failure };
        let mut nested = decision.nested.iter();
        let responses = ops.into_iter().map(|op| match op {
            TxnOp::Range(request) => {
                let space = self.space(request.range().space());
                TxnOpReply::Range(range::range(space, &request).expect("the read was checked"))
            }
            TxnOp::Put(put) => TxnOpReply::Put(self.put_checked(put)),
            TxnOp::Delete(delete) => TxnOpReply::Delete(self.delete(&delete)),
            TxnOp::Txn(inner) => TxnOpReply::Txn(self.run_branch(inner, next(&mut nested))),
        });
        let responses = responses.collect();
        TxnReply { revision: 0, succeeded: decision.succeeded, responses }
    }
}

fn check_ranges(space: &Space, txn: &TxnRequest, decision: &Decision) -> Result<(), Error> {
    let mut nested = decision.nested.iter();
    for op in branch(txn, decision) {
        match op {
            TxnOp::Range(request) => range::check(space, request)?,
            TxnOp::Put(_) | TxnOp::Delete(_) => {}
            TxnOp::Txn(inner) => check_ranges(space, inner, next(&mut nested))?,
        }
    }
    Ok(())
}

fn read_branch(space: &Space, txn: &TxnRequest, decision: &Decision) -> Result<TxnReply, Error> {
    let mut nested = decision.nested.iter();
    let mut responses = Vec::new();
    for op in branch(txn, decision) {
        responses.push(match op {
            TxnOp::Range(request) => TxnOpReply::Range(range::range(space, request)?),
            TxnOp::Txn(inner) => TxnOpReply::Txn(read_branch(space, inner, next(&mut nested))?),
            TxnOp::Put(_) | TxnOp::Delete(_) => unreachable!("the transaction only reads"),
        });
    }
    Ok(TxnReply { revision: 0, succeeded: decision.succeeded, responses })
}

fn branch<'a>(txn: &'a TxnRequest, decision: &Decision) -> &'a [TxnOp] {
    if decision.succeeded { &txn.success } else { &txn.failure }
}

fn next<'a>(nested: &mut impl Iterator<Item = &'a Decision>) -> &'a Decision {
    nested.next().expect("every nested transaction was decided")
}

fn decide(space: &Space, txn: &TxnRequest) -> Decision {
    let succeeded = txn.compares.iter().all(|compare| holds(space, compare));
    let ops = if succeeded { &txn.success } else { &txn.failure };
    let nested = ops.iter().filter_map(|op| match op {
        TxnOp::Txn(inner) => Some(decide(space, inner)),
        TxnOp::Range(_) | TxnOp::Put(_) | TxnOp::Delete(_) => None,
    });
    Decision { succeeded, nested: nested.collect() }
}

/// True if the compare holds for every key of the range; an empty range is compared as one missing key.
fn holds(space: &Space, compare: &Compare) -> bool {
    let range = KeyRange::new(compare.key.clone(), compare.range_end.clone());
    let mut found = space.scan(&range, space.revision()).peekable();
    if found.peek().is_none() {
        return key_holds(compare, None);
    }
    found.all(|change| key_holds(compare, Some(change)))
}

fn key_holds(compare: &Compare, found: Option<&Change>) -> bool {
    let number = |of: fn(&Change) -> i64, given: i64| found.map_or(0, of).cmp(&given);
    let order = match &compare.target {
        CompareTarget::Version(given) => number(|found| found.version.version, *given),
        CompareTarget::Create(given) => number(|found| found.version.create_revision, *given),
        CompareTarget::Mod(given) => number(|found| found.version.revision, *given),
        CompareTarget::Lease(given) => number(|found| found.version.lease.0, given.0),
        CompareTarget::Value(given) => match found.and_then(|found| found.version.value.as_ref()) {
            Some(value) => value.bytes().cmp(given),
            None => return false, // a missing key has no value: neither equal nor unequal
        },
    };
    match compare.result {
        CompareResult::Equal => order == Ordering::Equal,
        CompareResult::NotEqual => order != Ordering::Equal,
        CompareResult::Greater => order == Ordering::Greater,
        CompareResult::Less => order == Ordering::Less,
    }
}
