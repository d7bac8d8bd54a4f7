"use strict";
// Shows one episode: its frames on a canvas, curves below one another, and marks where it ends.
async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fit() { // the frame of a notebook as high as the page
  if (window.frameElement) window.frameElement.style.height = document.body.offsetHeight + "px";
}

function player(root, track) {
  if (root.stop) root.stop();
  const steps = Math.max(track.frames ? track.frames.count : 0, ...track.curves.map((c) => c.values[0].length));
  const part = (name, kind, into) => {
    const node = document.createElement(kind);
    node.className = name;
    into.append(node);
    return node;
  };
  root.replaceChildren();
  root.classList.add("player");
  const screen = track.frames ? part("screen", "canvas", root) : null;
  const side = part("side", "div", root);
  const controls = part("controls", "div", side);
  const play = part("play", "button", controls);
  const slider = part("seek", "input", controls);
  const speed = part("speed", "select", controls);
  const at = part("at", "span", controls);
  const curves = part("curves", "canvas", side);
  const note = part("faint", "div", side);
  Object.assign(slider, { type: "range", min: 0, max: Math.max(steps - 1, 0), value: 0 });
  slider.setAttribute("aria-label", "step");
  speed.setAttribute("aria-label", "steps a second");
  for (const n of [5, 15, 30, 60, 240]) speed.add(new Option(n + " /s", n, n === 15, n === 15));
  const words = { running: "its end is not held", cut: "cut: the next row begins another episode" };
  const said = [`episode ${track.number}, lane ${track.lane}, ${track.length} rows`, words[track.end] || track.end];
  if (track.return !== null) said.splice(1, 0, `return ${track.return}`);
  if (!track.whole) said.push("its first rows were overwritten");
  if (track.every > 1) said.push(`1 step in ${track.every} is shown, rewards between are added`);
  note.textContent = said.join(" · ");
  let frames = null, now = 0, timer = null;
  if (track.frames) {
    const { count, height, width, channels, data } = track.frames;
    const zoom = Math.max(1, Math.min(8, Math.floor(430 / Math.max(height, width))));
    Object.assign(screen, { width, height });
    screen.style.width = width * zoom + "px";
    root.ready = inflated(data).then((bytes) => {
      const size = height * width * channels;
      for (let i = size; i < count * size; i++) bytes[i] ^= bytes[i - size];
      frames = bytes;
      draw();
    });
  } else root.ready = Promise.resolve();

  function drawFrame() {
    if (!frames) return;
    const { count, height, width, channels } = track.frames;
    const context = screen.getContext("2d"), image = context.createImageData(width, height);
    const from = Math.min(now, count - 1) * height * width * channels;
    for (let i = 0; i < height * width; i++) {
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = frames[from + channels * i + (channels === 3 ? c : 0)];
      image.data[4 * i + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  }

  function drawCurves() {
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue("--" + name);
    const scale = window.devicePixelRatio || 1, wide = side.clientWidth || 400, high = 62, left = 4;
    curves.style.height = track.curves.length * high + "px";
    curves.width = wide * scale;
    curves.height = Math.max(track.curves.length, 1) * high * scale;
    const pen = curves.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    const x = (i) => left + ((wide - 2 * left) * (i + 0.5)) / Math.max(steps, 1);
    track.curves.forEach((curve, row) => {
      const top = row * high + 18, bottom = (row + 1) * high - 8;
      const all = curve.values.flat().filter((v) => v !== null);
      const low = Math.min(...(curve.kind === "bars" ? [0] : []), ...all), high2 = Math.max(...(curve.kind === "bars" ? [0] : []), ...all);
      const y = (v) => bottom - ((bottom - top) * (v - low)) / (high2 > low ? high2 - low : 1);
      const here = curve.values.map((v) => (v[now] === null || v[now] === undefined ? "NaN" : v[now])).slice(0, 6).join(" ");
      pen.fillStyle = color("ink");
      pen.fillText(`${curve.name}  ${here}`, left, top - 5);
      pen.fillStyle = color("faint");
      const range = all.length ? `${low} to ${high2}` : "no finite value";
      pen.fillText(range, wide - left - pen.measureText(range).width, top - 5);
      pen.strokeStyle = color("line");
      pen.strokeRect(left, top, wide - 2 * left, bottom - top);
      const line = (i, name) => { pen.fillStyle = color(name); pen.fillRect(x(i) - 1, top, 2, bottom - top); };
      if (track.end !== "running") line(steps - 1, track.end === "terminated" ? "warn" : "second");
      line(now, "third");
      curve.values.forEach((values, k) => {
        pen.strokeStyle = pen.fillStyle = curve.values.length > 1 ? `hsl(${(k * 137 + 205) % 360} 70% 50%)` : color("first");
        pen.beginPath();
        let open = false;
        values.forEach((v, i) => {
          if (v === null) { open = false; return; }
          if (curve.kind === "bars") {
            if (v) pen.fillRect(x(i) - 1, Math.min(y(v), y(0)), 2, Math.max(Math.abs(y(v) - y(0)), 1));
          } else {
            if (curve.kind === "steps" && open) pen.lineTo(x(i), y(values[i - 1]));
            if (open) pen.lineTo(x(i), y(v)); else pen.moveTo(x(i), y(v));
            open = true;
          }
        });
        pen.stroke();
      });
    });
  }

  function draw() {
    drawFrame();
    drawCurves();
    slider.value = now;
    at.textContent = `step ${now * track.every} of ${track.length}` + (now === steps - 1 && track.end !== "running" ? `, ${track.end}` : "");
    play.textContent = timer === null ? "play" : "pause";
  }

  function tick() {
    if (now + 1 >= steps) { root.stop(); draw(); return; }
    now++;
    timer = setTimeout(tick, 1000 / Number(speed.value));
    draw();
  }

  root.seek = (step) => { now = Math.max(0, Math.min(steps - 1, Math.round(step))); draw(); };
  root.stop = () => { clearTimeout(timer); timer = null; };
  play.onclick = () => {
    if (timer !== null) root.stop();
    else { if (now + 1 >= steps) now = 0; timer = setTimeout(tick, 0); }
    draw();
  };
  slider.oninput = () => root.seek(Number(slider.value));
  curves.onclick = (event) => root.seek((steps * event.offsetX) / curves.clientWidth - 0.5);
  if (window.fbufResize) window.removeEventListener("resize", window.fbufResize);
  window.fbufResize = () => { draw(); fit(); };
  window.addEventListener("resize", window.fbufResize);
  draw();
  fit();
}

function sortable(table) {
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    head.querySelector("button").onclick = () => {
      const down = head.getAttribute("aria-sort") !== "descending", body = table.tBodies[0];
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => { const cell = row.cells[column], n = cell.dataset.n; return n === undefined ? cell.textContent : n === "" ? -Infinity : Number(n); };
      const order = (a, b) => { const [p, q] = [key(a), key(b)]; return p < q ? -1 : p > q ? 1 : 0; };
      body.append(...[...body.rows].sort((a, b) => (down ? order(b, a) : order(a, b))));
    };
  }
}

const data = JSON.parse(document.getElementById("data").textContent), screen0 = document.getElementById("player");
function show(i) {
  for (const row of document.querySelectorAll("tr[data-track]")) row.classList.toggle("on", Number(row.dataset.track) === i);
  player(screen0, data.tracks[i]);
}
for (const table of document.querySelectorAll("table.sortable")) sortable(table);
for (const row of document.querySelectorAll("tr[data-track]")) row.onclick = () => show(Number(row.dataset.track));
if (data.tracks.length) show(0);
