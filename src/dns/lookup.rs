//! Periodic DNS queries, and the worker set that results from the answers.

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
use warmroute_core::worker::Worker;
use warmroute_metrics::Metrics;
use warmroute_server::fleet::discovery::worker_set::WorkerSetTracker;
use warmroute_server::fleet::discovery::{DiscoverySourceHealth, WorkerModel, resolve_each};

use super::{DnsAnswer, DnsAnswers, DnsConfig, DnsQuery};

/// Queries the names periodically and reports each new fleet. The first one is reported after the
/// first answer.
pub async fn watch(
    names: Vec<DnsConfig>,
    models: Vec<WorkerModel>,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> anyhow::Result<Infallible> {
    let resolvers = DnsResolvers::new(&names)?;
    let mut answers = DnsAnswers::default();
    let mut health: Vec<DiscoverySourceHealth> = names
        .iter()
        .map(|name| DiscoverySourceHealth::new(format!("dns {}", name.name), &metrics))
        .collect();
    let mut next_queries = vec![Instant::now(); names.len()];
    let mut tracker = WorkerSetTracker::new("dns", models);
    loop {
        let now = Instant::now();
        for (at, name) in names
            .iter()
            .enumerate()
            .filter(|(at, _)| next_queries[*at] <= now)
        {
            match resolvers.query_all(name, &mut answers).await {
                Ok(()) => health[at].mark_up(),
                Err(error) => health[at].mark_failed(&error),
            }
        }
        let now = Instant::now();
        for (due, name) in next_queries
            .iter_mut()
            .zip(&names)
            .filter(|(due, _)| **due <= now)
        {
            *due = now + name.refresh_interval.get();
        }
        answers.retain(&names);
        if answers.has_any() {
            tracker
                .update(answers.workers(&names))
                .into_iter()
                .for_each(&mut on_fleet);
        }
        tokio::time::sleep_until(next_queries.iter().min().copied().unwrap_or(now)).await;
    }
}

/// Queries the names once.
pub async fn resolve_once(
    names: &[DnsConfig],
    models: &[WorkerModel],
) -> anyhow::Result<Vec<Worker>> {
    let resolvers = DnsResolvers::new(names)?;
    let mut answers = DnsAnswers::default();
    for name in names {
        resolvers
            .query_all(name, &mut answers)
            .await
            .map_err(anyhow::Error::msg)?;
    }
    Ok(resolve_each(answers.workers(names), models).0)
}

/// Resolvers by address; `None` is the system resolver.
struct DnsResolvers(HashMap<Option<SocketAddr>, TokioResolver>);

impl DnsResolvers {
    fn new(names: &[DnsConfig]) -> anyhow::Result<Self> {
        let resolvers = names
            .iter()
            .map(|name| Ok((name.resolver, resolver(name.resolver)?)));
        Ok(Self(resolvers.collect::<anyhow::Result<_>>()?))
    }

    /// Sends all queries of a name and stores the answers. Returns the first failure.
    async fn query_all(&self, name: &DnsConfig, answers: &mut DnsAnswers) -> Result<(), String> {
        let Some(resolver) = self.0.get(&name.resolver) else {
            return Ok(());
        };
        let mut failed = None;
        let mut queried: Vec<DnsQuery> = Vec::new();
        loop {
            // The answer to one query may add further queries.
            let queries: Vec<_> = answers
                .queries(name)
                .into_iter()
                .filter(|query| !queried.contains(query))
                .collect();
            if queries.is_empty() {
                return failed.map_or(Ok(()), Err);
            }
            let results = join_all(queries.iter().map(|query| send_query(resolver, query))).await;
            for (query, answer) in queries.into_iter().zip(results) {
                queried.push(query.clone());
                match answer {
                    Ok(answer) => answers.insert(query, answer),
                    Err(error) => failed = failed.or(Some(format!("{query}: {error}"))),
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
    // The configured interval determines the query rate. Caching is left to upstream resolvers.
    builder.options_mut().cache_size = 0;
    Ok(builder.build()?)
}

async fn send_query(resolver: &TokioResolver, query: &DnsQuery) -> Result<DnsAnswer, NetError> {
    let (name, kind) = match query {
        DnsQuery::A(name) => (name, RecordType::A),
        DnsQuery::Aaaa(name) => (name, RecordType::AAAA),
        DnsQuery::Srv(name) => (name, RecordType::SRV),
    };
    if let Ok(address) = name.parse::<IpAddr>() {
        let is_of_kind = address.is_ipv4() == (kind == RecordType::A);
        return Ok(DnsAnswer::Addresses(
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
    Ok(match query {
        DnsQuery::Srv(_) => DnsAnswer::Targets(records.iter().filter_map(target).collect()),
        DnsQuery::A(_) | DnsQuery::Aaaa(_) => {
            DnsAnswer::Addresses(records.iter().filter_map(address).collect())
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
    // RFC 2782: the root domain as target means that the service is not available.
    let port = NonZeroU16::new(service.port).filter(|_| !service.target.is_root())?;
    Some((service.target.to_string(), port))
}
