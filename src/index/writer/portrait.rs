//! What a rank holds, out of the index and back into it. The names are the writer's own, the prefixes lie in the tries.

use std::io::Write;
use std::sync::Arc;

use super::{Named, RankWriter};
use crate::block::EngineHash;
use crate::index::SHARDS;
use crate::index::children::Mixed;
use crate::index::dump::{ApartName, BlockRow, Copies, PlacedName, RankDump, Share, Telling};
use crate::index::owners::Layers;
use crate::index::salts::SaltsDump;
use crate::index::trie::{BlockId, Trie};
use crate::tier::Tier;
use crate::worker::WorkerRank;

/// Names looked up in a trie before its writers are let in.
const GLANCE: usize = 1024;

impl RankWriter {
    /// Writes what the rank holds as one record of a dump.
    pub fn dump(&self, rank: WorkerRank, out: &mut impl Write) -> std::io::Result<()> {
        self.portrait(rank).write(out)
    }

    /// What the rank holds.
    pub fn portrait(&self, rank: WorkerRank) -> RankDump {
        let mut dump = RankDump {
            rank,
            position: None,
            blocks: Vec::new(),
            names: Vec::with_capacity(self.names.len()),
            waiting: self.waiting().collect(),
            groups: Vec::new(),
            shares: Vec::new(),
            more_groups: false,
            untold: self.untold,
            salts: SaltsDump::default(),
        };
        self.place_names(&mut dump);
        if let Some(groups) = &self.groups {
            dump.groups = groups
                .known()
                .iter()
                .map(|group| (group.id, group.need))
                .collect();
            dump.shares = groups.shares().collect();
            dump.more_groups = groups.more();
            dump.shares
                .sort_unstable_by_key(|share| (share.group, share.engine));
        }
        dump.names
            .sort_unstable_by_key(|name| (name.block, name.engine));
        dump.waiting.sort_unstable_by_key(|name| name.engine);
        dump
    }

    fn place_names(&self, dump: &mut RankDump) {
        let mut shards: [Vec<(EngineHash, Named)>; SHARDS] = std::array::from_fn(|_| Vec::new());
        for (engine, named) in self.names.iter() {
            shards[usize::from(named.place.shard)].push((engine, named));
        }
        for (shard, names) in shards.into_iter().enumerate() {
            let shard_trie = &self.index.shards[shard];
            // Only to have neighbours next to each other: it does no harm that others change the runs in between.
            let mut homes = Vec::with_capacity(names.len());
            for some in names.chunks(GLANCE) {
                let trie = shard_trie.read();
                homes.extend(
                    some.iter()
                        .map(|(engine, named)| (trie.home(named.place.block), *engine, *named)),
                );
            }
            drop(names);
            homes.sort_unstable_by_key(|(home, ..)| *home);
            let mut rows: Mixed<u64, u32> = Mixed::default();
            for some in homes.chunks(GLANCE) {
                let trie = shard_trie.read();
                for (_, engine, named) in some {
                    let block = row(&trie, named.place.block, &mut rows, &mut dump.blocks);
                    let copies =
                        self.copies(*engine, named.layers, self.doubts(*engine, named.layers));
                    dump.names.push(PlacedName {
                        engine: *engine,
                        block,
                        copies,
                    });
                }
            }
        }
    }

    fn waiting(&self) -> impl Iterator<Item = ApartName> {
        self.waiting.iter().map(|(engine, apart)| {
            let copies = self.copies(engine, apart.tiers, apart.doubts(self.generation));
            ApartName {
                engine,
                parent: apart.parent,
                local: apart.local,
                copies,
            }
        })
    }

    fn copies(&self, engine: EngineHash, layers: Layers, doubted: Layers) -> Copies {
        let mut copies = Copies::default();
        for tier in layers.iter_tiers() {
            copies.counts[tier as usize] =
                1 + self.extra.get(&(engine, tier)).copied().unwrap_or(0);
            copies.doubted[tier as usize] = doubted.has(tier);
        }
        copies
    }

    /// Replaces what the rank holds by what a dump says. Readers see nothing of the rank until all of it is there.
    pub fn restore(&mut self, dump: &RankDump) {
        self.clear();
        let empty = std::mem::replace(&mut self.seat, self.index.seats.write().hidden());
        for event in dump.tell(Telling::Once) {
            self.apply(&event);
        }
        if dump.is_doubted() || dump.untold.is_some() {
            self.doubt();
        }
        for name in &dump.names {
            self.recount(name.engine, name.copies);
        }
        for name in &dump.waiting {
            self.recount(name.engine, name.copies);
        }
        self.restore_groups(dump);
        self.untold = dump.untold;
        self.tally.doubts.lock().close();
        let needs = self
            .groups
            .as_ref()
            .map(|groups| Arc::new(groups.needs().clone()));
        let mut seats = self.index.seats.write();
        seats.replace(empty, self.seat, needs);
        seats.free(empty);
    }

    fn restore_groups(&mut self, dump: &RankDump) {
        let most = usize::try_from(self.tally.limits().names()).unwrap_or(usize::MAX);
        let Some(groups) = &mut self.groups else {
            return;
        };
        for share in &dump.shares {
            let Share { group, .. } = share;
            if let Some(at) = groups.find(dump.groups[*group as usize].0) {
                groups.set(at, share, most);
            }
        }
        if dump.more_groups {
            groups.set_more();
        }
        let mut doubts = self.tally.doubts.lock();
        for (engine, named) in self.names.iter() {
            groups
                .sure(engine)
                .iter()
                .for_each(|layer| _ = doubts.hear(named.place, layer));
        }
    }

    /// Sets the copies and doubts of a name. Tiers whose blocks exceeded a limit do not hold it.
    fn recount(&mut self, engine: EngineHash, copies: Copies) {
        let held = match (self.names.get(engine), self.waiting.get_mut(engine)) {
            (Some(named), _) => named.layers,
            (None, Some(apart)) => apart.tiers,
            (None, None) => return,
        };
        for (tier, count) in copies
            .held()
            .filter(|(tier, count)| *count > 1 && held.has(*tier))
        {
            if self.extra.len() as u64 >= self.tally.limits().names() {
                self.tally.note_over_limit(1);
                break;
            }
            self.extra.insert((engine, tier), count - 1);
            self.tally.add_copies(i64::from(count - 1));
        }
        let doubted = Tier::ALL
            .into_iter()
            .filter(|tier| copies.doubted[*tier as usize]);
        let doubted = doubted.fold(Layers::NONE, Layers::with);
        if let Some(named) = self.names.get(engine) {
            self.count_now(engine, doubted);
            let mut doubts = self.tally.doubts.lock();
            for tier in named.layers.tiers().except(doubted).iter_tiers() {
                doubts.hear(named.place, tier);
            }
        } else if let Some(apart) = self.waiting.get_mut(engine) {
            (apart.doubted, apart.counted) = (doubted, self.generation);
        }
    }
}

/// The row of a block, after the rows of all that it follows.
fn row(trie: &Trie, block: BlockId, rows: &mut Mixed<u64, u32>, into: &mut Vec<BlockRow>) -> u32 {
    let mut line = Vec::new();
    let mut next = Some(block);
    let mut parent = None;
    while let Some(block) = next {
        parent = rows.get(&u64::from(block.0)).copied();
        if parent.is_some() {
            break;
        }
        let (before, local) = trie.origin(block);
        line.push((block, local));
        next = before;
    }
    for (block, local) in line.into_iter().rev() {
        let at = into.len() as u32;
        into.push(BlockRow { parent, local });
        rows.insert(u64::from(block.0), at);
        parent = Some(at);
    }
    parent.unwrap_or_default()
}
