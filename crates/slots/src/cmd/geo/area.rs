//! Geohash encoding and the cells that cover a search area.
//!
//! A position is two numbers of `step` bits, longitude and latitude as fractions of their ranges, with interleaved
//! bits: a prefix is a cell. A search covers the cell of its centre and its eight neighbours, at a step at which they
//! are certain to cover the area, and then checks every point in them. The order of the cells is that of Redis,
//! because a reply without a requested order exposes it.

use std::f64::consts::PI;

/// Bits of longitude and of latitude in a score: 52 together, which a double represents exactly.
const MAX_STEP: u32 = 26;
const LONGITUDES: (f64, f64) = (-180.0, 180.0);
const LATITUDES: (f64, f64) = (-85.05112878, 85.05112878);
const EARTH_RADIUS_M: f64 = 6_372_797.560856;
const MERCATOR_MAX_M: f64 = 20_037_726.37;
const RADIANS: f64 = PI / 180.0;

/// A position on the globe.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) longitude: f64,
    pub(super) latitude: f64,
}

/// The search area around a point, in metres.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    Circle { radius: f64 },
    Box { width: f64, height: f64 },
}

impl Point {
    /// True if the position is within the supported range.
    pub(super) fn is_valid(self) -> bool {
        (LONGITUDES.0..=LONGITUDES.1).contains(&self.longitude)
            && (LATITUDES.0..=LATITUDES.1).contains(&self.latitude)
    }

    /// The sorted set score of the position.
    pub(super) fn score(self) -> u64 {
        Cell::around(self, MAX_STEP).bits
    }

    /// The position represented by a score: the centre of its cell.
    pub(super) fn of_score(score: f64) -> Point {
        let cell = Cell { bits: score as u64, step: MAX_STEP };
        let area = cell.area();
        let middle =
            |(low, high): (f64, f64), range: (f64, f64)| ((low + high) / 2.0).clamp(range.0, range.1);
        Point { longitude: middle(area.longitudes, LONGITUDES), latitude: middle(area.latitudes, LATITUDES) }
    }

    /// The standard 11-character geohash, with latitudes up to the poles.
    pub(super) fn geohash(self) -> [u8; 11] {
        const LETTERS: &[u8; 32] = b"0123456789bcdefghjkmnpqrstuvwxyz";
        let bits = encode(self, LONGITUDES, (-90.0, 90.0), MAX_STEP);
        std::array::from_fn(|at| {
            // 52 bits are ten characters and two bits: the last character is constant.
            let index = if at == 10 { 0 } else { bits >> (52 - (at + 1) * 5) & 0x1f };
            LETTERS[index as usize]
        })
    }

    /// Great-circle distance in metres.
    pub(super) fn distance(self, other: Point) -> f64 {
        let v = ((other.longitude * RADIANS - self.longitude * RADIANS) / 2.0).sin();
        if v == 0.0 {
            return latitude_distance(self.latitude, other.latitude);
        }
        let (lat1, lat2) = (self.latitude * RADIANS, other.latitude * RADIANS);
        let u = ((lat2 - lat1) / 2.0).sin();
        let a = u * u + lat1.cos() * lat2.cos() * v * v;
        2.0 * EARTH_RADIUS_M * a.sqrt().asin()
    }
}

fn latitude_distance(one: f64, other: f64) -> f64 {
    EARTH_RADIUS_M * (other * RADIANS - one * RADIANS).abs()
}

impl Shape {
    /// The distance of a point from the centre, if it is inside the area.
    pub(super) fn distance_inside(self, centre: Point, point: Point) -> Option<f64> {
        match self {
            Shape::Circle { radius } => Some(centre.distance(point)).filter(|distance| *distance <= radius),
            Shape::Box { width, height } => {
                if latitude_distance(point.latitude, centre.latitude) > height / 2.0 {
                    return None;
                }
                let beside = Point { longitude: centre.longitude, latitude: point.latitude };
                if point.distance(beside) > width / 2.0 {
                    return None;
                }
                Some(centre.distance(point))
            }
        }
    }

    /// The greatest distance of a point inside the area.
    fn reach(self) -> f64 {
        match self {
            Shape::Circle { radius } => radius,
            Shape::Box { width, height } => {
                let (across, up) = (width / 2.0, height / 2.0);
                (across * across + up * up).sqrt()
            }
        }
    }

    /// Bounding box of the area.
    fn bounds(self, centre: Point) -> Area {
        let (across, up) = match self {
            Shape::Circle { radius } => (radius, radius),
            Shape::Box { width, height } => (width / 2.0, height / 2.0),
        };
        let up = up / EARTH_RADIUS_M / RADIANS;
        // The edge nearer to a pole spans more degrees.
        let edge = if centre.latitude < 0.0 { centre.latitude - up } else { centre.latitude + up };
        let across = across / EARTH_RADIUS_M / (edge * RADIANS).cos() / RADIANS;
        Area {
            longitudes: (centre.longitude - across, centre.longitude + across),
            latitudes: (centre.latitude - up, centre.latitude + up),
        }
    }
}

/// A bounding box in degrees.
#[derive(Clone, Copy, Debug)]
struct Area {
    longitudes: (f64, f64),
    latitudes: (f64, f64),
}

/// A geohash cell: the first `2 * step` bits that its points share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    bits: u64,
    step: u32,
}

/// Inserts a zero bit after each of 32 bits.
fn spread(bits: u32) -> u64 {
    let mut x = u64::from(bits);
    x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    x = (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    x = (x | x << 2) & 0x3333_3333_3333_3333;
    (x | x << 1) & 0x5555_5555_5555_5555
}

/// The inverse of [`spread`]: every second bit.
fn gather(bits: u64) -> u32 {
    let mut x = bits & 0x5555_5555_5555_5555;
    x = (x | x >> 1) & 0x3333_3333_3333_3333;
    x = (x | x >> 2) & 0x0f0f_0f0f_0f0f_0f0f;
    x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
    x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    (x | x >> 16) as u32
}

fn encode(point: Point, longitudes: (f64, f64), latitudes: (f64, f64), step: u32) -> u64 {
    let part =
        |value: f64, (low, high): (f64, f64)| ((value - low) / (high - low) * (1u64 << step) as f64) as u32;
    spread(part(point.latitude, latitudes)) | spread(part(point.longitude, longitudes)) << 1
}

impl Cell {
    fn around(point: Point, step: u32) -> Cell {
        Cell { bits: encode(point, LONGITUDES, LATITUDES, step), step }
    }

    fn area(self) -> Area {
        let parts = (1u64 << self.step) as f64;
        let span = |at: u32, (low, high): (f64, f64)| {
            let edge = |at: f64| low + at / parts * (high - low);
            (edge(f64::from(at)), edge(f64::from(at) + 1.0))
        };
        Area {
            longitudes: span(gather(self.bits >> 1), LONGITUDES),
            latitudes: span(gather(self.bits), LATITUDES),
        }
    }

    /// The cell at an offset to the east and north, wrapping around the globe.
    ///
    /// An unchanged coordinate keeps its bits: longitude 180 and the greatest latitude lie one cell past the last
    /// one, and members there have such scores.
    fn moved(self, east: i32, north: i32) -> Cell {
        let mask = ((1u64 << self.step) - 1) as u32;
        let moved = |at: u32, by: i32| if by == 0 { at } else { at.wrapping_add_signed(by) & mask };
        let longitude = moved(gather(self.bits >> 1), east);
        let latitude = moved(gather(self.bits), north);
        Cell { bits: spread(latitude) | spread(longitude) << 1, ..self }
    }

    /// The score range of points in the cell: from the first, below the second.
    fn scores(self) -> (f64, f64) {
        let shift = 52 - 2 * self.step;
        ((self.bits << shift) as f64, ((self.bits + 1) << shift) as f64)
    }
}

/// The largest step whose cells still cover a radius in metres.
fn step_for(reach: f64, latitude: f64) -> u32 {
    if reach == 0.0 {
        return MAX_STEP;
    }
    let mut step = 1i32;
    let mut reach = reach;
    while reach < MERCATOR_MAX_M {
        reach *= 2.0;
        step += 1;
    }
    step -= 2;
    // Cells are narrower towards the poles.
    if latitude.abs() > 66.0 {
        step -= 1;
        if latitude.abs() > 80.0 {
            step -= 1;
        }
    }
    step.clamp(1, MAX_STEP as i32) as u32
}

/// Score ranges that together contain every point of an area, each once.
pub(super) fn covering(centre: Point, shape: Shape) -> Vec<(f64, f64)> {
    let bounds = shape.bounds(centre);
    let mut cell = Cell::around(centre, step_for(shape.reach(), centre.latitude));
    let falls_short = |cell: Cell| {
        cell.moved(0, 1).area().latitudes.1 < bounds.latitudes.1
            || cell.moved(0, -1).area().latitudes.0 > bounds.latitudes.0
            || cell.moved(1, 0).area().longitudes.1 < bounds.longitudes.1
            || cell.moved(-1, 0).area().longitudes.0 > bounds.longitudes.0
    };
    if cell.step > 1 && falls_short(cell) {
        cell = Cell::around(centre, cell.step - 1);
    }
    let area = cell.area();
    let is_needed = |east: i32, north: i32| {
        cell.step < 2
            || !(north < 0 && area.latitudes.0 < bounds.latitudes.0
                || north > 0 && area.latitudes.1 > bounds.latitudes.1
                || east < 0 && area.longitudes.0 < bounds.longitudes.0
                || east > 0 && area.longitudes.1 > bounds.longitudes.1)
    };
    const AROUND: [(i32, i32); 9] =
        [(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1)];
    let mut cells: Vec<Cell> = Vec::with_capacity(9);
    for (east, north) in AROUND.into_iter().filter(|(east, north)| is_needed(*east, *north)) {
        let next = cell.moved(east, north);
        // With very large cells, neighbours in two directions can be the same cell.
        if !cells.contains(&next) {
            cells.push(next);
        }
    }
    cells.into_iter().map(Cell::scores).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geohash_score_round_trip() {
        for (longitude, latitude) in [(13.361389, 38.115556), (-179.9, -85.0), (180.0, 85.0), (0.0, 0.0)] {
            let point = Point { longitude, latitude };
            let again = Point::of_score(point.score() as f64);
            assert!(point.distance(again) < 1.0, "{point:?} {again:?}");
        }
        let palermo = Point { longitude: 13.361389, latitude: 38.115556 };
        assert_eq!(palermo.score(), 3_479_099_956_230_698);
        assert_eq!(&palermo.geohash(), b"sqc8b49rny0");
    }

    #[test]
    fn covering_cells_contain_every_point_once() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..2_000 {
            let mut place =
                || Point { longitude: random.f64() * 360.0 - 180.0, latitude: random.f64() * 170.0 - 85.0 };
            let (centre, near) = (place(), place());
            let distance = centre.distance(near);
            // Near the date line Redis searches one side only, and so does this.
            if (centre.longitude - near.longitude).abs() > 170.0 || distance > 3_000_000.0 {
                continue;
            }
            let shape = Shape::Circle { radius: distance * 1.01 + 1.0 };
            let bounds = shape.bounds(centre);
            if bounds.latitudes.1 > 84.0 || bounds.latitudes.0 < -84.0 {
                continue;
            }
            let score = near.score() as f64;
            let found =
                covering(centre, shape).iter().filter(|(low, high)| (*low..*high).contains(&score)).count();
            assert_eq!(found, 1, "{centre:?} {near:?}");
        }
    }
}
