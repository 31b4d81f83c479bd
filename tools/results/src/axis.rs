//! Axes of plots, with explicit ticks.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

/// Scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AxisScale {
    Linear,
    Logarithmic,
}

/// An axis with its ticks.
#[derive(Clone, Debug)]
pub(super) struct PlotAxis {
    scale: AxisScale,
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl PlotAxis {
    /// Returns a logarithmic axis around the values. Its ticks are powers of ten. If fewer than three
    /// fit, twice and five times these powers are ticks as well.
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>) -> Self {
        let values = extent(values);
        let range = values.start / 1.3..values.end * 1.3;
        let ticks = |factors: &[f64]| -> Vec<f64> {
            let first = range.start.log10().floor() as i32;
            let last = range.end.log10().ceil() as i32;
            (first..=last)
                .flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)))
                .filter(|tick| range.contains(tick))
                .collect()
        };
        let powers = ticks(&[1.0]);
        Self {
            scale: AxisScale::Logarithmic,
            ticks: if powers.len() < 3 {
                ticks(&[1.0, 2.0, 5.0])
            } else {
                powers
            },
            range,
        }
    }

    /// Returns a linear axis from zero, with about five ticks.
    pub(super) fn linear(values: impl Iterator<Item = f64>) -> Self {
        let highest = extent(values).end * 1.08;
        let power = 10f64.powf((highest / 5.0).log10().floor());
        let factors = [1.0, 2.0, 5.0, 10.0];
        let factor = factors
            .into_iter()
            .find(|factor| factor * power >= highest / 5.0);
        let step = power * factor.unwrap_or(10.0);
        let count = (highest / step).ceil();
        Self {
            scale: AxisScale::Linear,
            range: 0.0..count * step,
            ticks: (0..=count as u32)
                .map(|tick| f64::from(tick) * step)
                .collect(),
        }
    }

    /// Returns a linear axis for values that differ by less than a factor of ten, and a logarithmic
    /// one for others.
    pub(super) fn for_values(values: impl Iterator<Item = f64> + Clone) -> Self {
        let Range { start, end } = extent(values.clone());
        if end < 10.0 * start {
            Self::linear(values)
        } else {
            Self::logarithmic(values)
        }
    }

    /// Returns the name of the scale.
    pub(super) fn scale_name(&self) -> &'static str {
        match self.scale {
            AxisScale::Linear => "linear",
            AxisScale::Logarithmic => "logarithmic",
        }
    }

    /// Returns the position of a value, from 0 at the start to 1 at the end.
    fn position(&self, value: f64) -> f64 {
        let Range { start, end } = self.range;
        match self.scale {
            AxisScale::Linear => (value - start) / (end - start),
            AxisScale::Logarithmic => (value / start).ln() / (end / start).ln(),
        }
    }
}

impl Ranged for PlotAxis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (start, end): (i32, i32)) -> i32 {
        start + (self.position(*value) * f64::from(end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for PlotAxis {
    /// Formats a tick as a whole number with thousands separators.
    fn format(value: &f64) -> String {
        let digits = format!("{value:.0}");
        let mut text = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        text
    }
}

/// Returns the least and the greatest value.
fn extent(values: impl Iterator<Item = f64>) -> Range<f64> {
    values.fold(f64::INFINITY..0.0, |extent, value| {
        extent.start.min(value)..extent.end.max(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_fit_range_of_values() {
        let axis = |values: &[f64]| PlotAxis::for_values(values.iter().copied());
        for (values, ticks, scale) in [
            (
                &[89.0, 199.0][..],
                &[0.0, 50.0, 100.0, 150.0, 200.0, 250.0][..],
                "linear",
            ),
            (&[47.0, 23_674.0], &[100.0, 1000.0, 10_000.0], "logarithmic"),
            (&[20.0, 300.0], &[20.0, 50.0, 100.0, 200.0], "logarithmic"),
        ] {
            let axis = axis(values);
            assert_eq!((&axis.ticks[..], axis.scale_name()), (ticks, scale));
            let inside = |value: &f64| (0.0..=1.0).contains(&axis.position(*value));
            assert!(values.iter().all(inside) && ticks.iter().all(inside));
        }
        let halfway = axis(&[1.0, 1e4]);
        assert_eq!(halfway.map(&100.0, (300, 0)), 150);
        assert_eq!(PlotAxis::format(&1_234_567.0), "1,234,567");
        assert_eq!(PlotAxis::format(&100.0), "100");
    }
}
