//! Which addresses are on the public internet. Pure.
//! Invariant: an address is judged by what is reached through it, so that no notation of a private one counts as
//! public.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The address that a connection actually reaches: `::ffff:10.0.0.1` and NAT64's `64:ff9b::10.0.0.1` are 10.0.0.1.
pub(super) fn reached(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) if v6.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0] => {
            let [.., a, b, c, d] = v6.octets();
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        }
        ip => ip,
    }
}

/// Whether an address is on the public internet, by IANA's special-purpose registries.
pub fn is_public(ip: IpAddr) -> bool {
    match reached(ip) {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => is_public_v6(ip),
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let special = match a {
        0 | 10 | 127 => true,
        100 => (64..128).contains(&b),
        // Azure's host agent uses an address of a public range.
        168 => ip == Ipv4Addr::new(168, 63, 129, 16),
        169 => b == 254,
        172 => (16..32).contains(&b),
        192 => matches!(
            (b, c),
            (0, 0) | (0, 2) | (88, 99) | (168, _) | (31, 196) | (52, 193) | (175, 48)
        ),
        198 => matches!((b, c), (18 | 19, _) | (51, 100)),
        203 => (b, c) == (0, 113),
        224.. => true,
        _ => false,
    };
    !special
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let s = ip.segments();
    // Only 2000::/3 is allocated for the public internet, minus the ranges below.
    let global = (0x2000..0x4000).contains(&s[0]);
    let special = matches!(
        (s[0], s[1]),
        (0x2001, 0x0000..=0x01ff)     // protocol assignments, Teredo, ORCHID, benchmarking
            | (0x2001, 0x0db8)        // documentation
            | (0x2002, _)             // 6to4 holds an IPv4 address
            | (0x2620, 0x004f)        // AS112
            | (0x3fff, 0x0000..=0x0fff) // documentation
    );
    global && !special
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipnet::IpNet;
    use proptest::prelude::*;

    /// IANA's registries of special addresses, the multicast and reserved space, and Azure's host agent.
    const SPECIAL: &[&str] = &[
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/8",
        "64:ff9b:1::/48",
        "100::/64",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",
        "4000::/2",
        "5f00::/16",
        "8000::/1",
        "fc00::/7",
        "fe80::/10",
        "fec0::/10",
        "ff00::/8",
    ];

    const PUBLIC: &[&str] = &[
        "1.0.0.0/8",
        "8.8.8.0/24",
        "93.184.216.0/24",
        "100.0.0.0/10",
        "100.128.0.0/9",
        "169.253.0.0/16",
        "172.15.0.0/16",
        "172.32.0.0/16",
        "192.167.0.0/16",
        "198.17.0.0/16",
        "198.20.0.0/16",
        "223.0.0.0/8",
        "2001:4860::/32",
        "2400::/12",
        "2606:4700::/32",
        "2a00::/12",
    ];

    fn within(net: &str, bits: u128) -> IpAddr {
        match net.parse().expect("a network") {
            IpNet::V4(net) => {
                let free = u32::MAX.checked_shr(net.prefix_len().into()).unwrap_or(0);
                IpAddr::V4((u32::from(net.network()) | bits as u32 & free).into())
            }
            IpNet::V6(net) => {
                let free = u128::MAX.checked_shr(net.prefix_len().into()).unwrap_or(0);
                IpAddr::V6((u128::from(net.network()) | bits & free).into())
            }
        }
    }

    /// Every way an IPv4 address can be embedded in an IPv6 one and be reached.
    fn carriers(ip: Ipv4Addr) -> [IpAddr; 2] {
        let bits = u128::from(u32::from(ip));
        [
            IpAddr::V6(ip.to_ipv6_mapped()),
            IpAddr::V6((0x0064_ff9b_u128 << 96 | bits).into()),
        ]
    }

    proptest! {
        #[test]
        fn no_address_of_a_special_block_is_public(index in 0..SPECIAL.len(), bits: u128) {
            let ip = within(SPECIAL[index], bits);
            // NAT64's own prefix and mapped addresses lie in `::/8` and are judged by what they carry.
            prop_assume!(reached(ip) == ip);
            prop_assert!(!is_public(ip), "{ip}");
            if let IpAddr::V4(v4) = ip {
                for carrier in carriers(v4) {
                    prop_assert!(!is_public(carrier), "{carrier}");
                }
            }
        }

        #[test]
        fn public_blocks_are_public(index in 0..PUBLIC.len(), bits: u128) {
            let ip = within(PUBLIC[index], bits);
            prop_assert!(is_public(ip), "{ip}");
        }

        #[test]
        fn an_ipv6_address_that_holds_a_private_one_is_never_public(bits: u32, shift in 0..6_u32) {
            let private = Ipv4Addr::from(0x0a00_0000 | bits & 0x00ff_ffff);
            let v4 = u128::from(u32::from(private));
            // Compatible, translated, 6to4, Teredo, NAT64 and its local prefix.
            let all = [
                v4,
                0xffff_0000_u128 << 32 | v4,
                0x2002_u128 << 112 | v4 << 80,
                0x2001_0000_u128 << 96 | !v4 & 0xffff_ffff,
                0x0064_ff9b_u128 << 96 | v4,
                0x0064_ff9b_0001_u128 << 80 | v4,
            ];
            let ip = IpAddr::V6(all[shift as usize].into());
            prop_assert!(!is_public(ip), "{ip}");
        }
    }
}
