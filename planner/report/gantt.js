// Draws the timelines of a report: predicted above measured, one canvas a rank, one common view.
// Only what is in view is drawn; what is narrower than a pixel and a half is summed by column.
(function () {
  "use strict";
  var root = document.getElementById("timeline");
  var block = document.getElementById("timeline-data");
  if (!root || !block) return;

  var ROW = 20, STRIP = 6, GAP = 5, THIN = 1.5;
  var runs = JSON.parse(block.textContent).timelines.map(unpack);
  var total = Math.max.apply(null, runs.map(function (run) { return run.end; })) || 1e-9;
  var view = { from: 0, to: total };
  var colours = {}, fills = Object.create(null), ops = rankOps(); // an op may have any name
  var axis = root.querySelector(".axis canvas");
  var canvases = Array.prototype.slice.call(root.querySelectorAll("canvas[data-rank]"));
  var tip = root.querySelector(".tip"), windowBar = root.querySelector(".view span");
  var range = root.querySelector(".range");

  // ------------------------------------------------------------------------------------ data
  function unpack(doc) {
    var ranks = doc.ranks.map(function (lanes) {
      return lanes.map(function (lane) { return unpackLane(lane, doc.tick_s); });
    });
    return { name: doc.name, ops: doc.ops, ranks: ranks, end: doc.makespan * doc.tick_s };
  }
  function unpackLane(lane, tick) {
    var n = lane.start.length, start = new Float64Array(n), end = new Float64Array(n);
    var reach = new Float64Array(n), at = 0, most = 0;
    for (var i = 0; i < n; i++) {
      at += lane.start[i];
      start[i] = at * tick;
      end[i] = (at + value(lane.length, i)) * tick;
      most = reach[i] = Math.max(most, end[i]); // transfers may overlap: ends are not sorted
    }
    return { n: n, start: start, end: end, reach: reach, raw: lane };
  }
  function value(column, i) { return typeof column === "number" ? column : column[i]; }
  function opOf(run, lane, i) { return run.ops[value(lane.raw.op, i)]; }
  function rankOps() {
    var time = [Object.create(null), Object.create(null)]; // compute, transfers
    runs.forEach(function (run) {
      run.ranks.forEach(function (lanes) {
        lanes.forEach(function (lane, which) {
          for (var i = 0; i < lane.n; i++) {
            var op = opOf(run, lane, i);
            time[which][op] = (time[which][op] || 0) + lane.end[i] - lane.start[i];
          }
        });
      });
    });
    var sorted = time.map(function (of) {
      return Object.keys(of).sort(function (a, b) { return of[b] - of[a]; });
    });
    return sorted[0].concat(sorted[1].filter(function (op) { return !(op in time[0]); }));
  }
  function firstAfter(lane, time) { // first action that ends after `time`
    var low = 0, high = lane.n;
    while (low < high) {
      var middle = (low + high) >> 1;
      if (lane.reach[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // --------------------------------------------------------------------------------- drawing
  function readColours() {
    var style = getComputedStyle(document.documentElement);
    function get(name) { return style.getPropertyValue(name).trim(); }
    ops.forEach(function (op, k) {
      var c = Math.min(k, 8);
      fills[op] = { fill: get("--c" + c), text: get("--t" + c) };
    });
    colours.text = get("--text"); colours.muted = get("--muted"); colours.line = get("--line");
    colours.track = get("--track"); colours.font = "11px " + getComputedStyle(document.body).fontFamily;
  }
  function prepare(canvas, height) {
    var ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
    var pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = colours.font;
    pen.textBaseline = "middle";
    return { pen: pen, width: width, height: height };
  }
  function drawLane(pen, width, run, lane, y, height) {
    var scale = width / (view.to - view.from), columns = Math.ceil(width);
    var cover = null, who = null, i = firstAfter(lane, view.from);
    for (; i < lane.n && lane.start[i] < view.to; i++) {
      var x0 = (lane.start[i] - view.from) * scale, x1 = (lane.end[i] - view.from) * scale;
      if (x1 - x0 < THIN) {
        if (!cover) { cover = new Float32Array(columns); who = new Array(columns); }
        var column = Math.max(0, Math.min(columns - 1, Math.floor(x0)));
        cover[column] += Math.max(x1 - x0, 0.05);
        who[column] = opOf(run, lane, i);
        continue;
      }
      var op = opOf(run, lane, i), left = Math.max(x0, 0), right = Math.min(x1, width);
      pen.fillStyle = fills[op].fill;
      pen.fillRect(left, y, right - left - (right - left > 4 ? 0.75 : 0), height);
      if (height >= 14 && right - left > 24) write(pen, label(run, lane, i), left, right, y, height, op);
    }
    if (!cover) return;
    for (var c = 0; c < columns; c++) {
      if (!cover[c]) continue;
      pen.globalAlpha = Math.max(0.3, Math.min(1, cover[c]));
      pen.fillStyle = fills[who[c]].fill;
      pen.fillRect(c, y, 1, height);
    }
    pen.globalAlpha = 1;
  }
  function write(pen, text, left, right, y, height, op) {
    var size = pen.measureText(text).width;
    if (size + 8 > right - left) return;
    pen.fillStyle = fills[op].text;
    pen.fillText(text, left + (right - left - size) / 2, y + height / 2 + 0.5);
  }
  function drawRank(canvas) {
    var rank = Number(canvas.dataset.rank), block = ROW + STRIP + GAP;
    var area = prepare(canvas, runs.length * block - GAP);
    runs.forEach(function (run, k) {
      var y = k * block, lanes = run.ranks[rank];
      area.pen.fillStyle = colours.track;
      area.pen.fillRect(0, y, area.width, ROW);
      if (!lanes) return;
      drawLane(area.pen, area.width, run, lanes[0], y, ROW);
      drawLane(area.pen, area.width, run, lanes[1], y + ROW + 1, STRIP - 2);
    });
    ends(area);
  }
  function ends(area) { // where each run ends
    area.pen.strokeStyle = colours.text;
    runs.forEach(function (run, k) {
      var x = (run.end - view.from) / (view.to - view.from) * area.width, y = k * (ROW + STRIP + GAP);
      if (x < 0 || x > area.width + 0.5) return;
      area.pen.beginPath();
      area.pen.moveTo(Math.min(x, area.width - 0.5), y);
      area.pen.lineTo(Math.min(x, area.width - 0.5), y + ROW + STRIP);
      area.pen.stroke();
    });
  }
  function drawAxis() {
    var area = prepare(axis, 20), span = view.to - view.from;
    var rough = span / Math.max(2, area.width / 95), power = Math.pow(10, Math.floor(Math.log10(rough)));
    var step = [1, 2, 5, 10].map(function (m) { return m * power; })
      .filter(function (s) { return s >= rough * 0.999; })[0];
    area.pen.fillStyle = colours.muted; area.pen.strokeStyle = colours.line;
    for (var k = Math.ceil(view.from / step); k * step <= view.to; k++) {
      var x = (k * step - view.from) / span * area.width, text = time(k * step, step);
      area.pen.beginPath(); area.pen.moveTo(x, 14); area.pen.lineTo(x, 20); area.pen.stroke();
      var size = area.pen.measureText(text).width;
      area.pen.fillText(text, Math.max(0, Math.min(area.width - size, x - size / 2)), 7);
    }
  }
  var pending = false;
  function draw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(function () { pending = false; drawNow(); });
  }
  function drawNow() {
    drawAxis();
    canvases.forEach(drawRank);
    windowBar.style.left = (view.from / total * 100) + "%";
    windowBar.style.width = ((view.to - view.from) / total * 100) + "%";
    range.textContent = time(view.from) + " to " + time(view.to);
  }

  // ------------------------------------------------------------------------------------ words
  function time(seconds, step) { // with a step: a tick, in the unit of the view's end
    var size = step ? view.to : Math.abs(seconds);
    var unit = size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : size >= 1e-6 ? ["us", 1e6] : ["ns", 1e9];
    var number = seconds * unit[1];
    if (seconds === 0) return "0";
    if (!step) return Number(number.toPrecision(4)) + " " + unit[0];
    var digits = Math.max(0, Math.min(9, -Math.floor(Math.log10(step * unit[1]) + 1e-9)));
    return number.toFixed(digits) + " " + unit[0];
  }
  function label(run, lane, i) { // as Action.label writes it
    var count = value(lane.raw.count, i), op = opOf(run, lane, i);
    if (count > 1) return op + " and " + (count - 1) + " more";
    var stage = value(lane.raw.stage, i), batch = value(lane.raw.microbatch, i), step = value(lane.raw.step, i);
    return (stage >= 0 ? stage : "") + op + (batch >= 0 ? batch : "") + (step >= 0 ? "." + step : "");
  }
  function describe(run, rank, which, i) {
    var lane = run.ranks[rank][which], raw = lane.raw, length = lane.end[i] - lane.start[i];
    var lines = [label(run, lane, i) + " · " + run.name], parts = [];
    if (value(raw.count, i) > 1) {
      parts.push("neighbouring actions, drawn as one");
    } else {
      if (value(raw.stage, i) >= 0) parts.push("stage " + value(raw.stage, i));
      if (value(raw.microbatch, i) >= 0) parts.push("micro-batch " + value(raw.microbatch, i));
      if (value(raw.step, i) >= 0) parts.push("step " + value(raw.step, i));
    }
    if (parts.length) lines.push(parts.join(", "));
    lines.push("starts at " + time(lane.start[i]) + ", takes " + time(length));
    runs.forEach(function (other) {
      var twin = other === run ? -1 : find(other, rank, which, label(run, lane, i));
      if (twin < 0) return;
      var far = other.ranks[rank][which], takes = far.end[twin] - far.start[twin];
      var text = other.name + ": starts at " + time(far.start[twin]) + ", takes " + time(takes);
      if (length > 0) text += " (" + (takes >= length ? "+" : "") + ((takes / length - 1) * 100).toFixed(1) + " %)";
      lines.push(text);
    });
    return lines.join("\n");
  }
  function find(run, rank, which, wanted) {
    var lane = run.ranks[rank] && run.ranks[rank][which];
    if (!lane) return -1;
    if (!lane.index) {
      lane.index = new Map();
      for (var i = 0; i < lane.n; i++) {
        if (value(lane.raw.count, i) === 1) lane.index.set(label(run, lane, i), i);
      }
    }
    return lane.index.has(wanted) ? lane.index.get(wanted) : -1;
  }

  // --------------------------------------------------------------------------------- movement
  function show(from, span) {
    span = Math.min(total, Math.max(span, total * 1e-6));
    view.from = Math.min(Math.max(0, from), total - span);
    view.to = view.from + span;
    hide();
    draw();
  }
  function zoom(factor, share) {
    var span = view.to - view.from, at = view.from + span * share;
    var wanted = Math.min(total, Math.max(span * factor, total * 1e-6));
    show(at - wanted * share, wanted);
  }
  function pan(share) { var span = view.to - view.from; show(view.from + share * span, span); }
  function place(canvas, event) { return (event.clientX - canvas.getBoundingClientRect().left) / canvas.clientWidth; }

  var pointers = new Map(), pinch = 0;
  function watch(canvas) {
    canvas.addEventListener("wheel", function (event) {
      var sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200))), place(canvas, event));
      } else if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) {
        event.preventDefault();
        pan(sideways / canvas.clientWidth);
      }
    }, { passive: false });
    canvas.addEventListener("dblclick", function (event) { zoom(0.4, place(canvas, event)); });
    canvas.addEventListener("pointerdown", function (event) {
      pointers.set(event.pointerId, event.clientX);
      canvas.setPointerCapture(event.pointerId);
      pinch = 0;
      point(canvas, event);
    });
    canvas.addEventListener("pointermove", function (event) {
      if (!pointers.has(event.pointerId)) { point(canvas, event); return; }
      var before = pointers.get(event.pointerId);
      pointers.set(event.pointerId, event.clientX);
      if (pointers.size === 1) {
        if (event.clientX !== before) pan((before - event.clientX) / canvas.clientWidth);
      } else if (pointers.size === 2) {
        var ends = Array.from(pointers.values()), apart = Math.max(20, Math.abs(ends[0] - ends[1]));
        var middle = ((ends[0] + ends[1]) / 2 - canvas.getBoundingClientRect().left) / canvas.clientWidth;
        if (pinch) zoom(pinch / apart, middle);
        pinch = apart;
      }
    });
    ["pointerup", "pointercancel"].forEach(function (name) {
      canvas.addEventListener(name, function (event) { pointers.delete(event.pointerId); pinch = 0; });
    });
    canvas.addEventListener("pointerleave", function (event) { if (event.pointerType === "mouse") hide(); });
  }
  function point(canvas, event) {
    if (!canvas.dataset.rank) return;
    var rank = Number(canvas.dataset.rank), box = canvas.getBoundingClientRect();
    var y = event.clientY - box.top, k = Math.floor(y / (ROW + STRIP + GAP)), run = runs[k];
    if (!run || !run.ranks[rank]) { hide(); return; }
    var which = y - k * (ROW + STRIP + GAP) < ROW ? 0 : 1, lane = run.ranks[rank][which];
    var pixel = (view.to - view.from) / canvas.clientWidth;
    var at = view.from + (event.clientX - box.left) * pixel, found = -1;
    for (var i = firstAfter(lane, at - pixel); i < lane.n && lane.start[i] <= at + pixel; i++) {
      if (lane.end[i] >= at - pixel && (found < 0 || lane.start[i] <= at)) found = i;
    }
    if (found < 0) { hide(); return; }
    tip.textContent = describe(run, rank, which, found);
    tip.hidden = false;
    var room = window.innerWidth - tip.offsetWidth - 8, below = event.clientY + 18;
    if (below + tip.offsetHeight > window.innerHeight) below = event.clientY - tip.offsetHeight - 12;
    tip.style.left = Math.max(8, Math.min(room, event.clientX + 12)) + "px";
    tip.style.top = below + "px";
  }
  function hide() { tip.hidden = true; }

  // ------------------------------------------------------------------------------------ start
  readColours();
  var legend = root.querySelector(".legend");
  ops.forEach(function (op, k) {
    var item = document.createElement("li"), key = document.createElement("span");
    key.className = "key f" + Math.min(k, 8);
    item.appendChild(key);
    item.appendChild(document.createTextNode(op));
    legend.appendChild(item);
  });
  canvases.concat([axis]).forEach(watch);
  var moves = {
    "in": function () { zoom(0.5, 0.5); }, "out": function () { zoom(2, 0.5); },
    all: function () { show(0, total); }, left: function () { pan(-0.25); }, right: function () { pan(0.25); }
  };
  root.querySelectorAll("button[data-move]").forEach(function (button) {
    button.addEventListener("click", function () { moves[button.dataset.move](); });
  });
  var keys = { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", "0": "all", Home: "all" };
  root.querySelector(".drawing").addEventListener("keydown", function (event) {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    moves[keys[event.key]]();
  });
  document.addEventListener("scroll", hide, { passive: true });
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", function () { readColours(); draw(); });
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (part) { part.open = true; });
    readColours(); drawNow();
  });
  window.addEventListener("afterprint", function () { readColours(); drawNow(); });
  drawNow();
})();
