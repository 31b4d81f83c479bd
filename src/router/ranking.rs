//! Who else could serve a request, for a gateway that tries the next where the chosen one cannot be reached or that wants
//! to know what everybody would cost. Where neither is wanted, nothing is computed.

use std::collections::HashSet;

use super::answer::Destination;
use super::destination;
use super::leg::Leg;
use super::pools::Standings;
use super::settings::RouterSettings;
use crate::fleet::Member;
use crate::schedule::costs;
use crate::worker::Endpoint;

/// The candidates of a phase by their costs.
#[derive(Debug, Default)]
pub(super) struct Ranking {
    pub(super) fallbacks: Vec<Destination>,
    pub(super) scores: Vec<(Endpoint, f64)>,
}

impl Ranking {
    /// Ranks the candidates, as far as that is wanted.
    pub(super) fn of(settings: &RouterSettings, leg: &Leg<'_>, standings: &Standings) -> Ranking {
        let (most, scored) = (settings.fallbacks, settings.scores);
        if most == 0 && !scored {
            return Ranking::default();
        }
        let costs = costs(&leg.question, &leg.candidates, &leg.weights).into_iter();
        // The choice takes what is no number for infinitely dear.
        let totals = costs.map(|cost| {
            if cost.total.is_nan() {
                f64::INFINITY
            } else {
                cost.total
            }
        });
        let mut ranked: Vec<(f64, &Member)> = totals.zip(leg.members.iter().copied()).collect();
        ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.rank.cmp(&b.1.rank)));
        let mut told = HashSet::from([leg.member().worker.endpoint.canonical()]);
        let others = ranked
            .iter()
            .map(|(_, member)| *member)
            .filter(|member| standings.is_well(member));
        let others = others.filter(|member| told.insert(member.worker.endpoint.canonical()));
        let fallbacks = others.take(most).map(destination).collect();
        let mut told = HashSet::new();
        let first = |(_, member): &&(f64, &Member)| told.insert(member.worker.endpoint.canonical());
        let scores = ranked.iter().filter(|_| scored).filter(first);
        Ranking {
            fallbacks,
            scores: scores
                .map(|(cost, member)| (member.worker.endpoint, *cost))
                .collect(),
        }
    }
}
