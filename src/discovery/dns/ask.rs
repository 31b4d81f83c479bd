//! Asking resolvers, again and again, and saying whom the answers add up to.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU16;
use std::sync::Arc;

use futures_util::future::join_all;
use hickory_resolver::TokioResolver;
use hickory_resolver::config::{NameServerConfig, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::rr::{RData, RecordType};
use tokio::time::Instant;

use super::{Answer, Answers, DnsConfig, Question};
use crate::discovery::found::Found;
use crate::discovery::{ServedModel, Standing, resolve_each};
use crate::metrics::Metrics;
use crate::worker::Worker;

/// Asks for ever and reports each new fleet, the first one with the first answer.
pub async fn watch(
    names: Vec<DnsConfig>,
    models: Vec<ServedModel>,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> anyhow::Result<Infallible> {
    let resolvers = Resolvers::new(&names)?;
    let mut answers = Answers::default();
    let mut standings: Vec<Standing> = names
        .iter()
        .map(|name| Standing::new(format!("dns {}", name.name), &metrics))
        .collect();
    let mut dues = vec![Instant::now(); names.len()];
    let mut found = Found::new("dns", models);
    loop {
        let now = Instant::now();
        for (at, name) in names.iter().enumerate().filter(|(at, _)| dues[*at] <= now) {
            match resolvers.ask_all(name, &mut answers).await {
                Ok(()) => standings[at].good(),
                Err(error) => standings[at].bad(&error),
            }
        }
        let now = Instant::now();
        for (due, name) in dues.iter_mut().zip(&names).filter(|(due, _)| **due <= now) {
            *due = now + name.every.get();
        }
        answers.keep(&names);
        if answers.has_any() {
            found
                .take(answers.workers(&names))
                .into_iter()
                .for_each(&mut on_fleet);
        }
        tokio::time::sleep_until(dues.iter().min().copied().unwrap_or(now)).await;
    }
}

/// Asks once.
pub async fn look(names: &[DnsConfig], models: &[ServedModel]) -> anyhow::Result<Vec<Worker>> {
    let resolvers = Resolvers::new(names)?;
    let mut answers = Answers::default();
    for name in names {
        resolvers
            .ask_all(name, &mut answers)
            .await
            .map_err(anyhow::Error::msg)?;
    }
    Ok(resolve_each(answers.workers(names), models).0)
}

/// Who is asked, by address; `None`: whom the system asks.
struct Resolvers(HashMap<Option<SocketAddr>, TokioResolver>);

impl Resolvers {
    fn new(names: &[DnsConfig]) -> anyhow::Result<Self> {
        let made = names
            .iter()
            .map(|name| Ok((name.resolver, resolver(name.resolver)?)));
        Ok(Self(made.collect::<anyhow::Result<_>>()?))
    }

    /// Asks all that follows from a name. Answers are kept one by one; the first failure is told.
    async fn ask_all(&self, name: &DnsConfig, answers: &mut Answers) -> Result<(), String> {
        let Some(resolver) = self.0.get(&name.resolver) else {
            return Ok(());
        };
        let mut failed = None;
        let mut asked: Vec<Question> = Vec::new();
        loop {
            // The answer to one question may be the next.
            let questions: Vec<_> = answers
                .questions(name)
                .into_iter()
                .filter(|question| !asked.contains(question))
                .collect();
            if questions.is_empty() {
                return failed.map_or(Ok(()), Err);
            }
            let told = join_all(questions.iter().map(|question| ask(resolver, question))).await;
            for (question, answer) in questions.into_iter().zip(told) {
                asked.push(question.clone());
                match answer {
                    Ok(answer) => answers.take(question, answer),
                    Err(error) => failed = failed.or(Some(format!("{question}: {error}"))),
                }
            }
        }
    }
}

fn resolver(at: Option<SocketAddr>) -> anyhow::Result<TokioResolver> {
    let mut builder = match at {
        None => TokioResolver::builder_tokio()?,
        Some(address) => {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            server
                .connections
                .iter_mut()
                .for_each(|connection| connection.port = address.port());
            let config = ResolverConfig::from_name_servers(vec![server]);
            TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        }
    };
    // How often is asked is said by the configuration; what lies in between has caches enough.
    builder.options_mut().cache_size = 0;
    Ok(builder.build()?)
}

async fn ask(resolver: &TokioResolver, question: &Question) -> Result<Answer, NetError> {
    let (name, kind) = match question {
        Question::V4(name) => (name, RecordType::A),
        Question::V6(name) => (name, RecordType::AAAA),
        Question::Service(name) => (name, RecordType::SRV),
    };
    if let Ok(address) = name.parse::<IpAddr>() {
        let is_of_kind = address.is_ipv4() == (kind == RecordType::A);
        return Ok(Answer::Addresses(
            is_of_kind.then_some(address).into_iter().collect(),
        ));
    }
    let records: Vec<RData> = match resolver.lookup(name.as_str(), kind).await {
        Ok(lookup) => lookup
            .answers()
            .iter()
            .map(|record| record.data.clone())
            .collect(),
        Err(error) if error.is_no_records_found() => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(match question {
        Question::Service(_) => Answer::Targets(records.iter().filter_map(target).collect()),
        Question::V4(_) | Question::V6(_) => {
            Answer::Addresses(records.iter().filter_map(address).collect())
        }
    })
}

fn address(record: &RData) -> Option<IpAddr> {
    match record {
        RData::A(address) => Some(address.0.into()),
        RData::AAAA(address) => Some(address.0.into()),
        _ => None,
    }
}

fn target(record: &RData) -> Option<(String, NonZeroU16)> {
    let RData::SRV(service) = record else {
        return None;
    };
    // A service that is decidedly not there has the root for a target.
    let port = NonZeroU16::new(service.port).filter(|_| !service.target.is_root())?;
    Some((service.target.to_string(), port))
}
