//! A measured curve as an SVG image, without a library: throughput above, latency below, one point per setting.

use std::fmt::Write as _;

const WIDTH: f64 = 640.0;
const PANEL: f64 = 150.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 30.0;
const GAP: f64 = 46.0;

/// Points of one setting.
pub(super) struct Chart {
    setting: String,
    points: Vec<(String, f64, f64)>,
}

impl Chart {
    /// An empty chart; `setting` names the varied setting.
    pub(super) fn new(setting: &str) -> Self {
        Self { setting: setting.into(), points: Vec::new() }
    }

    /// Adds a point: the value of the setting, messages per second, and milliseconds.
    pub(super) fn point(&mut self, value: &str, rate: f64, ms: f64) {
        self.points.push((value.into(), rate, ms));
    }

    /// The chart as SVG.
    pub(super) fn svg(&self) -> String {
        let height = TOP + 2.0 * PANEL + GAP + 60.0;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
        );
        let rates: Vec<f64> = self.points.iter().map(|point| point.1).collect();
        let times: Vec<f64> = self.points.iter().map(|point| point.2).collect();
        panel(&mut out, TOP, "messages/s until verified", "#1f6feb", &rates);
        panel(&mut out, TOP + PANEL + GAP, "ms from sent to counted, p50", "#bf5b04", &times);
        let base = TOP + 2.0 * PANEL + GAP;
        for (at, (value, ..)) in self.points.iter().enumerate() {
            let x = self.x(at);
            let _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{value}</text>",
                base + 18.0
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#444444\">{}</text>\n</svg>",
            (LEFT + WIDTH - RIGHT) / 2.0,
            base + 42.0,
            self.setting
        );
        out
    }

    fn x(&self, at: usize) -> f64 {
        x(at, self.points.len())
    }
}

fn x(at: usize, of: usize) -> f64 {
    LEFT + (at as f64 + 0.5) / of.max(1) as f64 * (WIDTH - LEFT - RIGHT)
}

fn panel(out: &mut String, top: f64, title: &str, color: &str, values: &[f64]) {
    let highest = ceiling(values.iter().copied().fold(0.0, f64::max));
    let y = |value: f64| top + PANEL * (1.0 - value / highest);
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"{:.1}\" font-weight=\"bold\">{title}</text>", top - 8.0);
    for step in 0..=4 {
        let value = highest * f64::from(step) / 4.0;
        let _ = writeln!(
            out,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y(value) + 4.0,
            label(value),
            at = y(value)
        );
    }
    let points: Vec<(f64, f64)> =
        values.iter().enumerate().map(|(at, value)| (x(at, values.len()), y(*value))).collect();
    let line: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let line = line.join(" ");
    let _ =
        writeln!(out, "<polyline points=\"{line}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>");
    for ((x, y), value) in points.iter().zip(values) {
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{color}\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"{color}\">{}</text>",
            y - 8.0,
            label(*value)
        );
    }
}

/// The next round number: 1, 2 or 5 times a power of ten.
fn ceiling(value: f64) -> f64 {
    if value <= 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0];
    steps.iter().map(|step| step * power).find(|round| *round >= value * 1.05).unwrap_or(20.0 * power)
}

fn label(value: f64) -> String {
    match value {
        v if v >= 10_000.0 => format!("{:.1}k", v / 1e3),
        v if v >= 100.0 || v == 0.0 => format!("{v:.0}"),
        v => format!("{v:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_above_the_highest_point() {
        for (value, expected) in
            [(0.0, 1.0), (0.9, 1.0), (1.0, 2.0), (7.0, 10.0), (4_900.0, 10_000.0), (99.0, 200.0)]
        {
            assert!((ceiling(value) - expected).abs() < 1e-9, "{value}: {}", ceiling(value));
        }
    }

    #[test]
    fn a_picture_has_every_point_twice() {
        let mut chart = Chart::new("clients");
        chart.point("1", 100.0, 5.0);
        chart.point("2", 20_000.0, 2.5);
        let svg = chart.svg();
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(svg.contains(">20.0k<") && svg.contains(">2.5<") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
